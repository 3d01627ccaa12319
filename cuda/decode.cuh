// The decode kernel of the portable family: see decode.h.
//
// K and V stream through a ring of stages in shared memory, a step of keys each. A tile of up to 16 rows is met by all four
// warps, each with its own keys of the step, and their results are merged at the end; a larger tile gives 16 rows to each warp.
#pragma once

#include "combine.cuh"
#include "decode.h"
#include "decode_tile.cuh"
#include "kv_product.cuh"
#include "paged.cuh"
#include "params.h"
#include "sequence.cuh"
#include "softmax.cuh"
#include "tile_config.h"
#include "tile_io.cuh"

namespace jax_varlen {

// The place of the tile that holds a unit.
__device__ __forceinline__ int FindTile(const DecodeList& list, int count, int64_t unit) {
  int lo = 0, hi = count - 1;
  while (lo < hi) {
    const int middle = (lo + hi + 1) / 2;
    if (list.tiles[middle].first_unit <= unit) {
      lo = middle;
    } else {
      hi = middle - 1;
    }
  }
  return lo;
}

// One tile and kv head, or the part of its keys that lies in a share.
struct Segment {
  int kv_head;
  int first_step;  // of the keys of the sequence
  int steps;
  bool whole;   // no other share has keys of this tile and head
  int partial;  // where the result goes otherwise
};

// What the warps leave in shared memory, where the stages were, when each has had keys of its own: four results of 16 rows.
template <int kHeadDim>
struct Pieces {
  static constexpr int kColumns = kHeadDim + 8;  // two rows then lie in different banks
  float out[4][16][kColumns];                    // not normalised
  float2 state[4][16];                           // maximum, in the exponent's units, and sum
};

// Stores columns of one row: as they are wanted where the segment is whole, else as a partial result. values(d) are the
// thread's columns Product::Column(d) and the next one, before they are normalised.
template <typename T, typename Product, typename Values>
__device__ __forceinline__ void StoreDecodeRow(const FwdParams& p, const Tile& tile, const Segment& segment,
                                               const Partials& partials, int row, float row_max, float row_sum, int d_begin,
                                               int d_end, Values values) {
  const DecodeRow where(p, tile, segment.kv_head, row);
  float out_scale = 1.f, shift = row_max;  // of a row that has seen no key -inf, with the sum 0; NaN makes a sum NaN
  const bool empty = row_sum == 0.f;
  if (segment.whole) {
    const float sink = where.Sink(p, tile);
    shift = fmaxf(row_max, sink);
    if (sink != -INFINITY) {
      out_scale = ptx::Exp2(row_max - shift);
      row_sum = fmaf(row_sum, out_scale, ptx::Exp2(sink - shift));
    }
  }
  const float lse = row_sum == 0.f ? -INFINITY : shift + ptx::Log2(row_sum);
  out_scale = empty ? 0.f : out_scale / row_sum;
  if (p.v_scale) out_scale *= p.v_scale[segment.kv_head];
  const bool leads = threadIdx.x % 4 == 0 && d_begin == 0;
  if (segment.whole) {
    T* out = static_cast<T*>(p.out) + where.Element(p, tile, p.head_dim_v);
#pragma unroll
    for (int d = d_begin; d < d_end; ++d) {
      const int column = Product::Column(d);
      if (column >= p.head_dim_v) break;
      const float2 x = values(d);
      *reinterpret_cast<uint32_t*>(out + column) = empty ? 0 : ptx::Pack2<T>(x.x * out_scale, x.y * out_scale);
    }
    if (leads) *where.Lse(p, tile) = lse * kLn2;
  } else {
    const int64_t place = static_cast<int64_t>(segment.partial) * partials.rows + row;
    float* out = partials.out + place * p.head_dim_v;
#pragma unroll
    for (int d = d_begin; d < d_end; ++d) {
      const int column = Product::Column(d);
      if (column >= p.head_dim_v) break;
      const float2 x = values(d);
      *reinterpret_cast<float2*>(out + column) = empty ? float2{0.f, 0.f} : float2{x.x * out_scale, x.y * out_scale};
    }
    if (leads) partials.lse[place] = lse;
  }
}

template <typename T, typename E, typename Config, bool kSplitKeys>
__device__ __forceinline__ void ComputeSegment(const FwdParams& p, const Tile& tile, const Segment& segment,
                                               const Partials& partials, uint8_t* smem, PoolRows<Config::kKeys>* pool_rows) {
  constexpr int kHeadDim = Config::kHeadDim, kKeys = Config::kKeys, kStages = Config::kStages;
  constexpr int kWarpKeys = kSplitKeys ? 16 : kKeys;  // that a warp meets in a step
  using Product = KvProduct<T, E, kHeadDim>;
  constexpr uint32_t kHalfBytes = 2 * Product::kColumns * kKeys, kStageBytes = 2 * kHalfBytes;
  constexpr int kLookUps = Config::kLookUps;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = RowsOf(p, tile);
  const int atom_row = kSplitKeys ? 0 : 16 * warp, first_key = kSplitKeys ? 16 * warp : 0, row0 = atom_row + lane / 4;
  const bool active = atom_row < rows && first_key < kKeys;
  const KeyRange any = VisibleToAny(p, Tile{tile.sequence, 0, 0, 0, tile.q_used, 0, 0, tile.k_used}, tile.q_used);
  const uint32_t stages = ptx::SmemAddress(smem);

  auto look_up = [&](int step) {
    if (step < segment.steps) pool_rows[step % kLookUps].LookUp(p, tile.sequence, (segment.first_step + step) * kKeys, any);
  };
  auto copy = [&](int step) {
    const uint32_t stage = stages + step % kStages * kStageBytes;
    if (step < segment.steps)
      CopyFromPool<E, kHeadDim, Config::kThreads, kKeys, true, true>(p, pool_rows[step % kLookUps], segment.kv_head, stage,
                                                                     stage + kHalfBytes);
  };
#pragma unroll
  for (int step = 0; step < kLookUps; ++step) look_up(step);
  ptx::CommitCopies();
  uint32_t q[kHeadDim / 16][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row0 + 8 * r;
    const DecodeRow where(p, tile, segment.kv_head, min(row, rows - 1));
    const T* source = static_cast<const T*>(p.q) + where.Element(p, tile, p.head_dim);
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; ++kk) Product::LoadQ(q[kk], source, kk, r, row < rows, static_cast<int>(p.head_dim));
  }
  ptx::WaitCopies<0>();
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    copy(step);
    ptx::CommitCopies();
  }

  const Logits logits(p, segment.kv_head * p.group_size);
  KeyRange seen[2];
  float slope[2];
  int position[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const DecodeRow row(p, tile, segment.kv_head, min(row0 + 8 * r, rows - 1));
    seen[r] = VisibleTo(p, tile, row.query);
    slope[r] = row.Slope(p, tile);
    position[r] = row.query + Shift(tile);
  }
  float acc_o[1][kHeadDim / 8][4] = {};
  SoftmaxState state;

  for (int step = 0; step < segment.steps; ++step) {
    // Step is there, and nobody reads the step before any more.
    ptx::WaitCopies<kStages - 2>();
    __syncthreads();
    copy(step + kStages - 1);
    look_up(step + kLookUps);
    ptx::CommitCopies();
    if (!active) continue;

    const uint32_t smem_k = stages + step % kStages * kStageBytes, smem_v = smem_k + kHalfBytes;
    float acc_s[1][kWarpKeys / 8][4];
    Product::Logits(acc_s, q, AddressB<Product::kColumns>(smem_k, first_key));

    const int key0 = (segment.first_step + step) * kKeys + first_key, column = key0 + 2 * (lane % 4);
    if (!logits.plain) {
      ScaleLogits(acc_s[0], logits, p.softcap);
#pragma unroll
      for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int distance = position[e / 2] - (column + 8 * n + e % 2);
          acc_s[0][n][e] = fmaf(-slope[e / 2], static_cast<float>(abs(distance)), acc_s[0][n][e]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int lo = seen[r].lo - column, hi = seen[r].hi - column;
      if (lo <= 0 && hi >= kWarpKeys) continue;
#pragma unroll
      for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * n + c < lo || 8 * n + c >= hi) acc_s[0][n][2 * r + c] = -INFINITY;
    }
    const float2 rescale = UpdateMax(acc_s[0], state, logits.exponent_scale);
    if (__any_sync(~0u, rescale.x != 1.f || rescale.y != 1.f)) {
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_o[0][d][e] *= e < 2 ? rescale.x : rescale.y;
    }
    Product::template Output<kWarpKeys / 16>(
        acc_o,
        [&](uint32_t (&fragment)[4], int, int kk) {
          Probabilities<T>(fragment, acc_s[0][2 * kk], acc_s[0][2 * kk + 1], state, logits.exponent_scale);
        },
        AddressA<Product::kColumns>(smem_v, first_key));
  }

  float row_max[2], row_sum[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] = QuadSum(state.row_sum[r]);
    row_max[r] = row_sum[r] == 0.f ? -INFINITY : state.shift[r];
  }
  if constexpr (!kSplitKeys) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (row0 + 8 * r < rows)
        StoreDecodeRow<T, Product>(p, tile, segment, partials, row0 + 8 * r, row_max[r], row_sum[r], 0, kHeadDim / 8,
                                   [&](int d) { return Product::Values(acc_o[0], r, d); });
  } else {
    Pieces<kHeadDim>& pieces = *reinterpret_cast<Pieces<kHeadDim>*>(smem);
    __syncthreads();  // nobody reads the stages any more, and none is on its way
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row0 + 8 * r;
      if (row >= rows) continue;
      if (lane % 4 == 0) pieces.state[warp][row] = {row_max[r], row_sum[r]};
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d)
        *reinterpret_cast<float2*>(&pieces.out[warp][row][Product::Column(d)]) = Product::Values(acc_o[0], r, d);
    }
    __syncthreads();
    // Each warp merges a quarter of the columns.
    for (int row = row0; row < rows; row += 8) {
      float top = -INFINITY, factor[4], sum = 0.f;
#pragma unroll
      for (int w = 0; w < 4; ++w) top = fmaxf(top, pieces.state[w][row].x);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 of_warp = pieces.state[w][row];
        factor[w] = of_warp.y == 0.f ? 0.f : ptx::Exp2(of_warp.x - top);
        sum = fmaf(of_warp.y, factor[w], sum);
      }
      StoreDecodeRow<T, Product>(p, tile, segment, partials, row, top, sum, warp * (kHeadDim / 32),
                                 (warp + 1) * (kHeadDim / 32), [&](int d) {
                                   float2 x = {0.f, 0.f};
#pragma unroll
                                   for (int w = 0; w < 4; ++w) {
                                     const float* y = &pieces.out[w][row][Product::Column(d)];
                                     x = {fmaf(y[0], factor[w], x.x), fmaf(y[1], factor[w], x.y)};
                                   }
                                   return x;
                                 });
    }
  }
}

template <typename T, typename E, typename Config>
__global__ __launch_bounds__(Config::kThreads, kDecodeCtas) void decode_kernel(const __grid_constant__ FwdParams p,
                                                                               const __grid_constant__ DecodeList list,
                                                                               const __grid_constant__ Partials partials) {
  extern __shared__ __align__(512) uint8_t smem[];
  __shared__ DecodeTile entry;
  __shared__ PoolRows<Config::kKeys> pool_rows[Config::kLookUps];
  const int share = blockIdx.x;
  const DecodeHead head = *list.head;
  if (share >= head.shares) return;
  const int64_t end = ShareBegin(head, share + 1);
  int64_t unit = ShareBegin(head, share);
  for (int t = FindTile(list, head.count, unit); unit < end; ++t) {
    __syncthreads();
    if (threadIdx.x < kWordsPerDecodeTile)
      reinterpret_cast<int32_t*>(&entry)[threadIdx.x] = reinterpret_cast<const int32_t*>(&list.tiles[t])[threadIdx.x];
    __syncthreads();
    const int64_t within = unit - entry.first_unit;
    const int units_per_head = entry.UnitsPerHead(p);
    Segment segment;
    segment.kv_head = static_cast<int>(within / units_per_head);
    int first = static_cast<int>(within - static_cast<int64_t>(segment.kv_head) * units_per_head);
    for (; segment.kv_head < p.num_kv_heads && unit < end; ++segment.kv_head, first = 0) {
      const int units = static_cast<int>(min(static_cast<int64_t>(units_per_head - first), end - unit));
      segment.whole = units == units_per_head;
      segment.first_step = entry.first_step + first;
      segment.steps = segment.whole ? entry.steps : units;
      segment.partial = SlotOf(share, first == 0);
      if (RowsOf(p, entry.tile) <= 16) {
        ComputeSegment<T, E, Config, true>(p, entry.tile, segment, partials, smem, pool_rows);
      } else {
        ComputeSegment<T, E, Config, false>(p, entry.tile, segment, partials, smem, pool_rows);
      }
      if (!segment.whole) {
        const int64_t begin = unit - first;
        Combine<T, Config::kThreads>(p, entry.tile, segment.kv_head, partials, ShareOf(head, begin),
                                     ShareOf(head, begin + units_per_head - 1), share);
      }
      __syncthreads();
      unit += units;
    }
  }
}

template <typename T, typename E, typename Config>
cudaError_t LaunchDecodeAs(const FwdParams& params, const DecodeList& list, const Partials& partials, cudaStream_t stream) {
  const auto kernel = decode_kernel<T, E, Config>;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes))
    return error;
  kernel<<<partials.shares, Config::kThreads, Config::kSmemBytes, stream>>>(params, list, partials);
  return cudaGetLastError();
}

template <typename T, typename E>
cudaError_t LaunchDecode(const FwdParams& params, const DecodeList& list, const Partials& partials, cudaStream_t stream) {
  using Tiles = DecodeTiles<sizeof(E)>;
  switch (DecodeHeadDim(params.head_dim, params.head_dim_v)) {
    case 64:
      return LaunchDecodeAs<T, E, typename Tiles::Of64>(params, list, partials, stream);
    case 128:
      return LaunchDecodeAs<T, E, typename Tiles::Of128>(params, list, partials, stream);
    default:
      return LaunchDecodeAs<T, E, typename Tiles::Of256>(params, list, partials, stream);
  }
}

}  // namespace jax_varlen
