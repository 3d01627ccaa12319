#include "offsets.h"

namespace jax_varlen {
namespace {

std::string Element(const std::string& name, const std::string& index, int64_t value) {
  return name + "[" + index + "] is " + std::to_string(value);
}

std::string Element(const std::string& name, int64_t i, int64_t value) {
  return Element(name, std::to_string(i), value);
}

std::string CheckNotFalling(const std::string& name, const int32_t* cu, int64_t batch) {
  for (int64_t b = 0; b < batch; ++b)
    if (cu[b + 1] < cu[b])
      return name + " must not decrease: " + Element(name, b + 1, cu[b + 1]) + " after " + name + "[" + std::to_string(b) +
             "] = " + std::to_string(cu[b]) + "; offsets are running sums of lengths, as cu_seqlens_from_lengths makes them.";
  return "";
}

std::string CheckCuSeqlens(const std::string& name, const char* array, const int32_t* cu, int64_t batch, int64_t total) {
  if (cu[0] < 0) return name + " must not be negative: " + Element(name, 0, cu[0]) + "; the first offset is usually 0.";
  if (const std::string error = CheckNotFalling(name, cu, batch); !error.empty()) return error;
  if (cu[batch] > total)
    return name + " must end within the " + std::to_string(total) + " rows of " + array + ": " +
           Element(name, batch, cu[batch]) + "; the last offset is the sum of the lengths.";
  return "";
}

// Without cu_seqlens a sequence has all rows that its length names.
std::string CheckSeqused(const std::string& name, const std::string& cu_name, const int32_t* seqused, const int32_t* cu,
                         int64_t batch) {
  for (int64_t b = 0; b < batch; ++b) {
    if (cu == nullptr && seqused[b] < 0) return name + " must not be negative: " + Element(name, b, seqused[b]) + ".";
    if (cu == nullptr) continue;
    const int64_t rows = int64_t{cu[b + 1]} - cu[b];
    if (seqused[b] < 0 || seqused[b] > rows)
      return name + " must lie between 0 and the rows that " + cu_name + " gives a sequence: " + Element(name, b, seqused[b]) +
             " for a sequence of " + std::to_string(rows) + " rows.";
  }
  return "";
}

// A length that the block table cannot hold, and ids of blocks that hold keys.
std::string CheckBlockTable(const FwdParams& p) {
  const auto text = [](int64_t x) { return std::to_string(x); };
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = UsedLength(p.cu_seqlens_k, p.seqused_k, b), blocks = (length + p.block_size - 1) / p.block_size;
    if (blocks > p.max_blocks) {
      const std::string which = p.seqused_k != nullptr
                                    ? Element("seqused_k", b, length)
                                    : "cu_seqlens_k[" + text(b + 1) + "] - " + Element("cu_seqlens_k", b, length);
      return "With block_table (" + text(p.batch) + ", " + text(p.max_blocks) +
             ") a sequence has 0 to max_blocks * block_size = " + text(p.max_blocks * p.block_size) + " keys: " + which +
             "; for longer ones give the table more columns.";
    }
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t id = p.block_table[b * p.max_blocks + i];
      if (id < 0 || id >= p.num_blocks)
        return "block_table must hold ids of the " + text(p.num_blocks) + " blocks of k and v: block_table[" + text(b) + ", " +
               text(i) + "] is " + text(id) + ", and sequence " + text(b) + " has " + text(length) + " keys in " +
               text(blocks) + " blocks of " + text(p.block_size) + "; entries behind those may be anything.";
    }
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
  const bool paged = p.block_size > 0;
  std::string error = CheckCuSeqlens("cu_seqlens_q", "q", p.cu_seqlens_q, p.batch, p.total_q);
  if (error.empty() && p.cu_seqlens_k != nullptr)
    error = paged ? CheckNotFalling("cu_seqlens_k", p.cu_seqlens_k, p.batch)
                  : CheckCuSeqlens("cu_seqlens_k", "k", p.cu_seqlens_k, p.batch, p.total_k);
  if (error.empty() && p.seqused_q != nullptr)
    error = CheckSeqused("seqused_q", "cu_seqlens_q", p.seqused_q, p.cu_seqlens_q, p.batch);
  if (error.empty() && p.seqused_k != nullptr)
    error = CheckSeqused("seqused_k", "cu_seqlens_k", p.seqused_k, p.cu_seqlens_k, p.batch);
  if (error.empty() && paged) error = CheckBlockTable(p);
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
