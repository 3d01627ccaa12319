#include "append.h"

#include <algorithm>

#include "simd_generic.h"

namespace jax_varlen {
namespace {

int64_t SizeOf(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kE4M3 ? 1 : 2;
}

struct F32 {
  using Storage = float;
  static F Read(const float* p) { return Load(p); }
};
struct BF16 {
  using Storage = uint16_t;
  static F Read(const uint16_t* p) { return FromBf16(p); }
};
struct F16 {
  using Storage = uint16_t;
  static F Read(const uint16_t* p) { return FromF16(p); }
};

// `n` elements of one head.
template <typename T>
void Quantize(const typename T::Storage* from, int64_t n, float scale, uint8_t* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) ToE4M3(T::Read(from + i) / Set(scale), to + i);
  if (i == n) return;
  typename T::Storage last[kLanes] = {};
  uint8_t rounded[kLanes];
  std::copy(from + i, from + n, last);
  ToE4M3(T::Read(last) / Set(scale), rounded);
  std::copy(rounded, rounded + (n - i), to + i);
}

template <typename T>
void QuantizeHeads(const void* from, int64_t heads, int64_t num_kv_heads, int64_t head_dim, const float* scale, void* to) {
  for (int64_t i = 0; i < heads; ++i)
    Quantize<T>(static_cast<const typename T::Storage*>(from) + i * head_dim, head_dim,
                scale == nullptr ? 1.0f : scale[i % num_kv_heads], static_cast<uint8_t*>(to) + i * head_dim);
}

// `rows` rows of k or v, from row `source` of the packed array to row `target` of the pool. Both hold the heads of a row, and
// then the rows, one behind the other.
void Write(const AppendParams& p, const void* packed, int64_t source, void* pool, int64_t target, int64_t rows,
           int64_t head_dim, const float* scale) {
  const int64_t elements = p.num_kv_heads * head_dim, size = SizeOf(p.dtype), heads = rows * p.num_kv_heads;
  const void* from = static_cast<const char*>(packed) + source * elements * size;
  void* to = static_cast<char*>(pool) + target * elements * SizeOf(p.cache_dtype);
  if (p.cache_dtype == p.dtype) {
    memcpy(to, from, static_cast<size_t>(rows * elements * size));
  } else if (p.dtype == DType::kF32) {
    QuantizeHeads<F32>(from, heads, p.num_kv_heads, head_dim, scale, to);
  } else if (p.dtype == DType::kBF16) {
    QuantizeHeads<BF16>(from, heads, p.num_kv_heads, head_dim, scale, to);
  } else {
    QuantizeHeads<F16>(from, heads, p.num_kv_heads, head_dim, scale, to);
  }
}

}  // namespace

int64_t AppendRowsPerUnit(const AppendParams& p) {
  constexpr int64_t kUnitBytes = int64_t{1} << 18;
  return std::max<int64_t>(1, kUnitBytes / (p.num_kv_heads * (p.head_dim + p.head_dim_v) * SizeOf(p.dtype)));
}

void Append(const AppendParams& p, int64_t begin, int64_t end) {
  const int32_t* cu = p.cu_seqlens;
  int64_t b = std::upper_bound(cu, cu + p.batch, begin) - cu - 1;  // the last sequence that starts here or before
  for (int64_t row = begin, rows; row < end; row += rows) {
    while (row >= cu[b + 1]) ++b;
    const int64_t position = int64_t{p.seqused_k[b]} + row - cu[b], in_block = position % p.block_size;
    const int64_t block = p.block_table[b * p.max_blocks + position / p.block_size];
    rows = std::min(std::min<int64_t>(end, cu[b + 1]) - row, p.block_size - in_block);
    const int64_t target = block * p.block_size + in_block;
    Write(p, p.k, row, p.k_cache, target, rows, p.head_dim, p.k_scale);
    Write(p, p.v, row, p.v_cache, target, rows, p.head_dim_v, p.v_scale);
  }
}

}  // namespace jax_varlen
