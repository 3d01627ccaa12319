#include "offsets.h"

namespace jax_varlen {
namespace {

std::string Element(const std::string& name, const std::string& index, int64_t value) {
  return name + "[" + index + "] is " + std::to_string(value);
}

std::string Element(const std::string& name, int64_t i, int64_t value) {
  return Element(name, std::to_string(i), value);
}

std::string CheckCuSeqlens(const std::string& name, const char* array, const int32_t* cu, int64_t batch, int64_t total) {
  if (cu[0] < 0) return name + " must not be negative: " + Element(name, 0, cu[0]) + "; the first offset is usually 0.";
  for (int64_t b = 0; b < batch; ++b)
    if (cu[b + 1] < cu[b])
      return name + " must not decrease: " + Element(name, b + 1, cu[b + 1]) + " after " + name + "[" + std::to_string(b) +
             "] = " + std::to_string(cu[b]) + "; offsets are running sums of lengths, as cu_seqlens_from_lengths makes them.";
  if (cu[batch] > total)
    return name + " must end within the " + std::to_string(total) + " rows of " + array + ": " +
           Element(name, batch, cu[batch]) + "; the last offset is the sum of the lengths.";
  return "";
}

std::string CheckSeqused(const std::string& name, const std::string& cu_name, const int32_t* seqused, const int32_t* cu,
                         int64_t batch) {
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t rows = int64_t{cu[b + 1]} - cu[b];
    if (seqused[b] < 0 || seqused[b] > rows)
      return name + " must lie between 0 and the rows that " + cu_name + " gives a sequence: " + Element(name, b, seqused[b]) +
             " for a sequence of " + std::to_string(rows) + " rows.";
  }
  return "";
}

// The positions first .. last of sequence b, in its row of the block table.
std::string CheckBlocks(const AppendParams& p, int64_t b, int64_t first, int64_t last) {
  for (int64_t column = first / p.block_size; column <= last / p.block_size; ++column) {
    const int64_t block = p.block_table[b * p.max_blocks + column];
    if (block < 0 || block >= p.num_blocks)
      return "block_table must name blocks of the pool, which has " + std::to_string(p.num_blocks) + ": " +
             Element("block_table", std::to_string(b) + ", " + std::to_string(column), block) + ", where sequence " +
             std::to_string(b) + " appends the positions " + std::to_string(first) + " to " + std::to_string(last) + ".";
  }
  return "";
}

}  // namespace

std::string CheckOffsets(const FwdParams& p) {
  std::string error = CheckCuSeqlens("cu_seqlens_q", "q", p.cu_seqlens_q, p.batch, p.total_q);
  if (error.empty()) error = CheckCuSeqlens("cu_seqlens_k", "k", p.cu_seqlens_k, p.batch, p.total_k);
  if (error.empty() && p.seqused_q != nullptr)
    error = CheckSeqused("seqused_q", "cu_seqlens_q", p.seqused_q, p.cu_seqlens_q, p.batch);
  if (error.empty() && p.seqused_k != nullptr)
    error = CheckSeqused("seqused_k", "cu_seqlens_k", p.seqused_k, p.cu_seqlens_k, p.batch);
  return error;
}

std::string CheckAppend(const AppendParams& p) {
  std::string error = CheckCuSeqlens("cu_seqlens", "k", p.cu_seqlens, p.batch, p.total);
  const int64_t capacity = p.max_blocks * p.block_size;
  for (int64_t b = 0; b < p.batch && error.empty(); ++b) {
    const int64_t tokens = p.cu_seqlens[b + 1] - p.cu_seqlens[b], first = p.seqused_k[b], last = first + tokens - 1;
    if (tokens == 0) continue;
    if (first < 0) {
      error = "seqused_k must not be negative: " + Element("seqused_k", b, first) + ".";
    } else if (last >= capacity) {
      error = "The tokens must fit in the block table, whose " + std::to_string(p.max_blocks) + " blocks of " +
              std::to_string(p.block_size) + " hold " + std::to_string(capacity) +
              " of a sequence: " + Element("seqused_k", b, first) + ", and cu_seqlens gives the sequence " +
              std::to_string(tokens) + " more.";
    } else {
      error = CheckBlocks(p, b, first, last);
    }
  }
  return error;
}

int64_t UsedLength(const int32_t* cu_seqlens, const int32_t* seqused, int64_t sequence) {
  return seqused != nullptr ? seqused[sequence] : int64_t{cu_seqlens[sequence + 1]} - cu_seqlens[sequence];
}

}  // namespace jax_varlen
