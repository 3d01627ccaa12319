"""What `append_kv` writes, as a loop over tokens in NumPy."""

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def append(k_cache, v_cache, k, v, cu_seqlens, seqused_k, block_table, k_scale=None, v_scale=None):
    """The pools, as new arrays. Tokens that have no place are left out."""
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    num_blocks, block_size = k_cache.shape[:2]
    for b, table in enumerate(block_table):
        for i in range(int(cu_seqlens[b + 1]) - int(cu_seqlens[b])):
            column, row = divmod(int(seqused_k[b]) + i, block_size)
            if not 0 <= column < len(table) or not 0 <= table[column] < num_blocks:
                continue
            for pool, x, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
                pool[table[column], row] = stored(x[cu_seqlens[b] + i], pool.dtype, scale)
    return k_cache, v_cache


def stored(x, dtype, scale):
    """A token (num_kv_heads, head_dim) as the pool holds it: in float32 by definition, as the kernels divide in float32."""
    if dtype != E4M3:
        return x
    scale = np.ones(1, np.float32) if scale is None else np.reshape(scale, -1).astype(np.float32)
    return np.clip(x.astype(np.float32) / scale[:, None], np.float32(-448), np.float32(448)).astype(E4M3)
