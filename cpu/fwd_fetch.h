// Asks for memory long before it is read: rows of one head are short and far apart, which no processor foresees. The
// requests are spread over the inner products, because only a dozen or so can be on their way at a time.
#pragma once

#include "fwd_kernel.h"

namespace jax_varlen {
namespace {

class Fetcher {
 public:
  void Clear() { count_ = current_ = 0; }

  void Add(const void* first_row, int64_t row_bytes, int64_t stride_bytes, int64_t rows) {
    if (rows > 0) streams_[count_++] = {static_cast<const char*>(first_row), row_bytes, stride_bytes, rows};
  }

  void Some(int64_t lines) {
    while (lines > 0 && current_ < count_) {
      Stream& s = streams_[current_];
      for (int64_t i = 0; i < s.bytes; i += kLine) __builtin_prefetch(s.row + i, 0, 2);
      lines -= (s.bytes + kLine - 1) / kLine;
      s.row += s.stride;
      if (--s.rows == 0) ++current_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Stream {
    const char* row;
    int64_t bytes, stride, rows;
  };
  Stream streams_[4];  // at most: out, q, k, v
  int count_ = 0, current_ = 0;
};

// Keys begin .. end of the sequence.
inline void FetchKeys(const FwdParams& p, const FwdItem& item, int64_t begin, int64_t end, int64_t element, Fetcher* fetcher) {
  const int64_t row = (item.first_k + begin) * p.num_kv_heads + item.kv_head;
  const int64_t k_bytes = p.head_dim * element, v_bytes = p.head_dim_v * element;
  fetcher->Add(static_cast<const char*>(p.k) + row * k_bytes, k_bytes, p.num_kv_heads * k_bytes, end - begin);
  fetcher->Add(static_cast<const char*>(p.v) + row * v_bytes, v_bytes, p.num_kv_heads * v_bytes, end - begin);
}

// The item's rows of q or out, of `dims` elements each.
inline void FetchRows(const FwdParams& p, const FwdItem& item, const void* array, int64_t dims, int64_t element,
                      Fetcher* fetcher) {
  const int64_t group_size = p.num_heads / p.num_kv_heads;
  const int64_t first_token = item.row_begin / group_size, last_token = (item.row_end - 1) / group_size;
  const int64_t row = (item.first_q + first_token) * p.num_heads + item.kv_head * group_size;
  const int64_t bytes = dims * element;
  fetcher->Add(static_cast<const char*>(array) + row * bytes, group_size * bytes, p.num_heads * bytes,
               last_token - first_token + 1);
}

}  // namespace
}  // namespace jax_varlen
