"""Variable-length (packed) and paged flash attention for JAX."""

from . import reference as reference
from .adapters import attention_fn as attention_fn
from .adapters import dot_product_attention as dot_product_attention
from .attention import varlen_attention as varlen_attention
from .context_parallel import context_parallel_attention as context_parallel_attention
from .context_parallel import stripe as stripe
from .context_parallel import unstripe as unstripe
from .export import export_checks as export_checks
from .kernels import info as info
from .merge import merge_attention as merge_attention
from .packing import cu_seqlens_from_lengths as cu_seqlens_from_lengths
from .packing import cu_seqlens_from_segment_ids as cu_seqlens_from_segment_ids
from .packing import pack as pack
from .packing import positions as positions
from .packing import segment_ids as segment_ids
from .packing import unpack as unpack
from .paged import append_kv as append_kv
from .show import show_mask as show_mask

__version__ = "0.1.0"
