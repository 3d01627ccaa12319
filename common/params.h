// The contract between the FFI handlers and the kernels: one plain struct per launch.
//
// Words: a sequence is b in [0, batch); its rows of q are cu_seqlens_q[b] .. cu_seqlens_q[b + 1], its rows of k and v
// are cu_seqlens_k[b] .. cu_seqlens_k[b + 1], and only the first seqused_q[b] (seqused_k[b]) of them count. With a block
// table k and v are pools of blocks: key j of sequence b is row j % block_size of block block_table[b, j / block_size], and
// its number of keys is seqused_k[b], or the difference of cu_seqlens_k where that is absent.
// docs/semantics.md says what the attention of a sequence is.
#pragma once

#include <cstdint>

namespace jax_varlen {

enum class DType { kF32, kBF16, kF16, kE4M3 };

// Window bounds are in tokens, both ends included; kUnbounded is no bound. Causal is window_right = 0.
constexpr int64_t kUnbounded = -1;

struct FwdParams {
  const void* q;                // (total_q, num_heads, head_dim)
  const void* k;                // (total_k, num_kv_heads, head_dim), or (num_blocks, block_size, num_kv_heads, head_dim)
  const void* v;                // (total_k, num_kv_heads, head_dim_v), or (num_blocks, block_size, num_kv_heads, head_dim_v)
  const int32_t* cu_seqlens_q;  // (batch + 1,)
  const int32_t* cu_seqlens_k;  // (batch + 1,), or null where a block table and seqused_k are given
  const int32_t* seqused_q;     // (batch,) or null: all rows count
  const int32_t* seqused_k;     // (batch,) or null: all rows count
  const int32_t* block_table;   // (batch, max_blocks), where block_size > 0; else k and v are packed
  const float* softmax_scale;   // ()
  const float* alibi_slopes;    // (num_heads,), (batch, num_heads) or null: no bias
  const float* sinks;           // (num_heads,) or null: no extra logit
  const float* k_scale;         // (num_kv_heads,) or null: what the elements of k are multiplied by
  const float* v_scale;         // (num_kv_heads,) or null: the same for v
  void* out;                    // (total_q, num_heads, head_dim_v)
  float* lse;                   // (num_heads, total_q)

  int64_t total_q;
  int64_t total_k;     // rows of k and v; of the pool, num_blocks * block_size
  int64_t num_blocks;  // this and the two below are 0 where k and v are packed
  int64_t block_size;  // at least 1 where they are not
  int64_t max_blocks;
  int64_t batch;
  int64_t num_heads;
  int64_t num_kv_heads;
  int32_t group_size;  // query heads of a kv head: num_heads / num_kv_heads
  int64_t head_dim;
  int64_t head_dim_v;
  int64_t alibi_batch_stride;  // num_heads when alibi_slopes is (batch, num_heads), else 0
  int64_t window_left;         // >= 0, or kUnbounded
  int64_t window_right;        // >= 0, or kUnbounded
  float softcap;               // 0: none
  bool batch_invariant;        // whether the bits of a paged sequence depend on itself alone
  DType dtype;                 // of q and out
  DType kv_dtype;              // of k and v: that of q, or kE4M3 with a block table
};

// The backward pass. Of `fwd` it reads all but `out` and `sinks`; lse is that of the forward pass, or of a merged one.
struct BwdParams {
  FwdParams fwd;
  const void* dout;    // (total_q, num_heads, head_dim_v)
  const float* delta;  // (num_heads, total_q): rowsum(dout * out) - dlse
  void* dq;            // (total_q, num_heads, head_dim)
  void* dk;            // (total_k, num_kv_heads, head_dim)
  void* dv;            // (total_k, num_kv_heads, head_dim_v)
};

// Token i of sequence b, row cu_seqlens[b] + i of k and v, goes to position seqused_k[b] + i of the sequence in the pools.
struct AppendParams {
  const void* k;               // (total, num_kv_heads, head_dim)
  const void* v;               // (total, num_kv_heads, head_dim_v)
  const int32_t* cu_seqlens;   // (batch + 1,)
  const int32_t* seqused_k;    // (batch,): the tokens in the pools before this launch
  const int32_t* block_table;  // (batch, max_blocks)
  const float* k_scale;        // (num_kv_heads,) or null: what the elements of k are divided by, for kE4M3 alone
  const float* v_scale;        // (num_kv_heads,) or null: the same for v
  void* k_cache;               // (num_blocks, block_size, num_kv_heads, head_dim)
  void* v_cache;               // (num_blocks, block_size, num_kv_heads, head_dim_v)

  int64_t total;
  int64_t batch;
  int64_t num_blocks;
  int64_t block_size;  // at least 1, as all below
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t head_dim_v;
  int64_t max_blocks;  // may be 0
  DType dtype;         // of k and v: no kE4M3
  DType cache_dtype;   // of the pools: dtype or kE4M3
};

}  // namespace jax_varlen
