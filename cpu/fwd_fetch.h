// Asks for memory long before it is read: rows of one head are short and far apart, which no processor foresees. The
// requests are spread over the inner products, because only a dozen or so can be on their way at a time.
#pragma once

#include "fwd_keys.h"

namespace jax_varlen {
namespace {

class Fetcher {
 public:
  void Clear() { count_ = current_ = 0; }

  // Rows begin .. end of an array, or the rows that `rows` names there.
  void Add(const void* array, int64_t row_bytes, int64_t stride_bytes, const int64_t* rows, int64_t begin, int64_t end) {
    if (begin < end) streams_[count_++] = {static_cast<const char*>(array), row_bytes, stride_bytes, rows, begin, end};
  }

  void Some(int64_t lines) {
    while (lines > 0 && current_ < count_) {
      Stream& s = streams_[current_];
      const char* row = s.array + (s.rows == nullptr ? s.begin : s.rows[s.begin]) * s.stride;
      for (int64_t i = 0; i < s.bytes; i += kLine) __builtin_prefetch(row + i, 0, 2);
      lines -= (s.bytes + kLine - 1) / kLine;
      if (++s.begin == s.end) ++current_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Stream {
    const char* array;
    int64_t bytes, stride;
    const int64_t* rows;
    int64_t begin, end;
  };
  Stream streams_[4];  // at most: out, q, k, v
  int count_ = 0, current_ = 0;
};

// Keys tile + begin .. tile + end of the sequence. `keys` tells where they stand, and must stay until they are fetched.
inline void FetchKeys(const FwdParams& p, const FwdItem& item, int64_t tile, int64_t begin, int64_t end, int64_t element,
                      KeyRows* keys, Fetcher* fetcher) {
  FindKeys(p, item, tile, begin, end, keys);
  const auto add = [&](const void* array, int64_t bytes) {
    fetcher->Add(static_cast<const char*>(array) + item.kv_head * bytes, item.num_heads * bytes, p.num_kv_heads * bytes,
                 keys->row, begin, end);
  };
  add(p.k, p.head_dim * element);
  add(p.v, p.head_dim_v * element);
}

// The item's rows of q or out, of `dims` elements each.
inline void FetchRows(const FwdParams& p, const FwdItem& item, const void* array, int64_t dims, int64_t element,
                      Fetcher* fetcher) {
  const int64_t group_size = p.num_heads / p.num_kv_heads;
  const int64_t first_token = item.row_begin / group_size, last_token = (item.row_end - 1) / group_size;
  const int64_t bytes = dims * element;
  fetcher->Add(static_cast<const char*>(array) + item.kv_head * group_size * bytes, item.num_heads * group_size * bytes,
               p.num_heads * bytes, nullptr, item.first_q + first_token, item.first_q + last_token + 1);
}

}  // namespace
}  // namespace jax_varlen
