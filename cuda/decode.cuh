// The decode kernel of the portable family: see decode.h.
//
// K and V stream through a ring of stages in shared memory, a step of keys each. A tile of up to 16 rows is met by all four
// warps, each with its own keys of the step, and their results are merged at the end. Of a larger tile each warp has 32 rows
// and half of the keys, so that a fragment of K or V serves two products; at head_dim 256 it has 16 rows and all keys.
#pragma once

#include "combine.cuh"
#include "decode.h"
#include "decode_tile.cuh"
#include "kv_product.cuh"
#include "launch.h"
#include "paged.cuh"
#include "params.h"
#include "sequence.cuh"
#include "softmax.cuh"
#include "tile_config.h"
#include "tile_io.cuh"

namespace jax_varlen {

// One step of the keys that a CTA meets. Steps of one tile and head, as far as they lie in one part, are a segment.
struct alignas(16) Step {
  Tile tile;
  KeyRange seen;  // by any row of the sequence
  int kv_head;
  int key0;
  int left;  // steps of the segment that follow; kNoStep where there is no step
  int part;
  int first_part, last_part;  // in which the tile and head lies
  int slot_rows;              // of the room for a partial result

  __device__ __forceinline__ bool IsWhole() const { return first_part == last_part; }
};

constexpr int kNoStep = -1;

// Where the segments of a CTA go on.
struct Cursor {
  int64_t unit;  // the first of the next segment
  int64_t end;   // of the part
  int part;      // none yet where negative
  int place;     // of the tile in the list
};

template <typename Config>
struct DecodeShared {
  static constexpr int kSteps = Config::kLookUps + 1;
  Step steps[kSteps];
  PoolRows<Config::kKeys> pool_rows[Config::kLookUps];
  Cursor cursor;               // of the last warp
  float2 states[kDecodeRows];  // maxima and sums of rows that meet
};

// The place of the tile that holds a unit. A warp looks at 32 places at a time.
__device__ __forceinline__ int FindTile(const DecodeList& list, int count, int64_t unit) {
  int lo = 0, hi = count;  // it is one of lo .. hi - 1
  while (hi - lo > 1) {
    const int stride = (hi - lo + 31) / 32, place = lo + static_cast<int>(threadIdx.x % 32) * stride;
    const bool begins_before = place < hi && list.tiles[place].first_unit <= unit;
    lo += (__popc(__ballot_sync(~0u, begins_before)) - 1) * stride;
    hi = min(hi, lo + stride);
  }
  return lo;
}

// The steps that a CTA meets, one stream wherever segments end. The last warp runs kLookUps steps ahead of the products and
// looks the keys of a step up in the table; kStages - 1 steps ahead their copy starts.
template <typename E, typename Config>
struct Stream {
  static constexpr int kAhead = Config::kStages - 1;  // steps of copies, and of look-ups before them
  static constexpr uint32_t kHalfBytes = Config::kHeadDim * sizeof(E) * Config::kKeys, kStageBytes = 2 * kHalfBytes;
  static_assert(Config::kLookUps == 2 * kAhead);

  const FwdParams& p;
  const DecodeList& list;
  DecodeShared<Config>& shared;
  uint8_t* smem;       // the stages
  int rows_of_share;   // see Partials
  unsigned looked_up;  // steps

  __device__ __forceinline__ Stream(const FwdParams& p, const DecodeList& list, DecodeShared<Config>& shared, uint8_t* smem,
                                    int rows_of_share)
      : p(p), list(list), shared(shared), smem(smem), rows_of_share(rows_of_share), looked_up(0) {
    if (threadIdx.x == Config::kThreads - 1) shared.cursor = {0, 0, -1, 0};
    for (int i = 0; i < Config::kLookUps; ++i) Advance();
  }

  // The step that comes next, before Advance, and the one that is there after it.
  __device__ __forceinline__ const Step& Next() const { return StepAt(looked_up - Config::kLookUps); }
  __device__ __forceinline__ const Step& Current() const { return StepAt(looked_up - Config::kLookUps - 1); }

  // Keys and, kHalfBytes behind, values of the current step.
  __device__ __forceinline__ uint8_t* Stage() const { return StageAt(looked_up - Config::kLookUps - 1); }

  // Waits for the next step. What the threads have read of the one before it may be overwritten.
  __device__ __forceinline__ void Advance() {
    ptx::WaitCopies<kAhead - 1>();
    __syncthreads();
    if (looked_up >= kAhead) {
      const unsigned n = looked_up - kAhead;
      const Step& step = StepAt(n);
      const uint32_t stage = ptx::SmemAddress(StageAt(n));
      if (step.left != kNoStep)
        CopyFromPool<E, Config::kHeadDim, Config::kThreads, Config::kKeys, true, true>(
            p, shared.pool_rows[n % Config::kLookUps], step.kv_head, stage, stage + kHalfBytes);
    }
    if (threadIdx.x >= Config::kThreads - 32) LookUp();
    ptx::CommitCopies();
    ++looked_up;
  }

 private:
  __device__ __forceinline__ Step& StepAt(unsigned n) const { return shared.steps[n % DecodeShared<Config>::kSteps]; }
  __device__ __forceinline__ uint8_t* StageAt(unsigned n) const { return smem + n % Config::kStages * kStageBytes; }

  __device__ __forceinline__ void LookUp() {
    const int lane = threadIdx.x % 32;
    Step& next = StepAt(looked_up);
    const Step& before = StepAt(looked_up - 1);
    const int left = looked_up == 0 ? 0 : before.left;
    if (left > 0) {
      constexpr int kWords = sizeof(Step) / sizeof(int);
      if (lane < kWords) reinterpret_cast<int*>(&next)[lane] = reinterpret_cast<const int*>(&before)[lane];
      __syncwarp();
      if (lane == 0) {
        next.left = left - 1;
        next.key0 += Config::kKeys;
      }
    } else if (left == kNoStep || !BeginSegment(next)) {
      if (lane == 0) next.left = kNoStep;
      return;
    }
    __syncwarp();
    shared.pool_rows[looked_up % Config::kLookUps].LookUp(p, next.tile.sequence, next.key0, next.seen, lane, 32);
  }

  // The part after `part`, or -1. A CTA has the first part of one share; the others, longer ones first, go to the CTAs that are
  // done first.
  __device__ __forceinline__ int TakePart(const DecodeHead& head, int part) {
    if (part < 0) return static_cast<int>(blockIdx.x) < head.shares ? static_cast<int>(blockIdx.x) * head.parts : -1;
    if (head.parts == 1) return -1;
    int taken = 0;
    if (threadIdx.x % 32 == 0) taken = atomicAdd(&list.head->taken, 1);
    taken = __shfl_sync(~0u, taken, 0);
    const int before = taken / head.shares, i = 1 + before;
    return i < head.parts ? (taken - before * head.shares) * head.parts + i : -1;
  }

  // False where there is none any more.
  __device__ __forceinline__ bool BeginSegment(Step& step) {
    Cursor cursor = shared.cursor;
    const DecodeHead head = *list.head;
    if (cursor.unit == cursor.end) {
      cursor.part = TakePart(head, cursor.part);
      if (cursor.part < 0) return false;
      cursor.unit = PartBegin(head, cursor.part);
      cursor.end = PartBegin(head, cursor.part + 1);
      cursor.place = FindTile(list, head.count, cursor.unit);
    }
    DecodeTile entry = list.tiles[cursor.place];
    int units_per_head = entry.UnitsPerHead(p);
    if (cursor.unit == entry.first_unit + units_per_head * p.num_kv_heads) {
      entry = list.tiles[++cursor.place];
      units_per_head = entry.UnitsPerHead(p);
    }
    const int64_t within = cursor.unit - entry.first_unit;
    const int kv_head = static_cast<int>(Quotient(within, units_per_head));
    const int first = static_cast<int>(within - static_cast<int64_t>(kv_head) * units_per_head);
    const int units = static_cast<int>(min(static_cast<int64_t>(units_per_head - first), cursor.end - cursor.unit));
    const bool is_whole = units == units_per_head;
    const int64_t begin = cursor.unit - first;
    cursor.unit += units;
    __syncwarp();  // all lanes have read the cursor
    if (threadIdx.x % 32 != 0) return true;
    shared.cursor = cursor;
    const Tile& tile = entry.tile;
    step.tile = tile;
    step.seen = VisibleToAny(p, Tile{tile.sequence, 0, 0, 0, tile.q_used, 0, 0, tile.k_used}, tile.q_used);
    step.kv_head = kv_head;
    step.key0 = (entry.first_step + first) * Config::kKeys;
    step.left = (is_whole ? entry.steps : units) - 1;
    step.part = cursor.part;
    step.first_part = is_whole ? cursor.part : PartOf(head, begin);
    step.last_part = is_whole ? cursor.part : PartOf(head, begin + units_per_head - 1);
    step.slot_rows = rows_of_share / head.parts;
    return true;
  }
};

// Stores columns of one row: as they are wanted where the segment is whole, else as a partial result. values(d) are the
// thread's columns Product::Column(d) and the next one, before they are normalised.
template <typename T, typename Product, typename Values>
__device__ __forceinline__ void StoreDecodeRow(const FwdParams& p, const Step& step, const Partials& partials, int row,
                                               float row_max, float row_sum, int d_begin, int d_end, Values values) {
  const Tile& tile = step.tile;
  const DecodeRow where(p, tile, step.kv_head, row);
  const bool is_whole = step.IsWhole();
  float out_scale = 1.f, shift = row_max;  // of a row that has seen no key -inf, with the sum 0; NaN makes a sum NaN
  const bool empty = row_sum == 0.f;
  if (is_whole) {
    const float sink = where.Sink(p, tile);
    shift = fmaxf(row_max, sink);
    if (sink != -INFINITY) {
      out_scale = ptx::Exp2(row_max - shift);
      row_sum = fmaf(row_sum, out_scale, ptx::Exp2(sink - shift));
    }
  }
  const float lse = row_sum == 0.f ? -INFINITY : shift + ptx::Log2(row_sum);
  out_scale = empty ? 0.f : out_scale / row_sum;
  if (p.v_scale) out_scale *= p.v_scale[step.kv_head];
  const bool leads = threadIdx.x % 4 == 0 && d_begin == 0;
  if (is_whole) {
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
    const int64_t place = static_cast<int64_t>(SlotOf(step.part, step.part == step.first_part)) * step.slot_rows + row;
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

// kRowWarps warps share the rows of a tile, kAtoms times 16 each; the others have the same rows and other keys of each step.
template <typename T, typename E, typename Config, int kRowWarps, int kAtoms>
__device__ __forceinline__ void ComputeSegment(const FwdParams& p, const Partials& partials, Stream<E, Config>& stream) {
  constexpr int kHeadDim = Config::kHeadDim, kKeys = Config::kKeys;
  constexpr int kKeyWarps = Config::kThreads / 32 / kRowWarps, kWarpRows = 16 * kAtoms;
  constexpr int kWarpKeys = kKeys / kKeyWarps < 16 ? 16 : kKeys / kKeyWarps;  // that a warp meets in a step
  constexpr int kKeysAtOnce = kAtoms * kHeadDim > 128 ? 16 : kWarpKeys;       // where the registers are full
  using Product = KvProduct<T, E, kHeadDim>;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key_warp = warp / kRowWarps;
  const int first_key = kWarpKeys * key_warp, first_row = kWarpRows * (warp % kRowWarps), row0 = first_row + lane / 4;
  const int rows = RowsOf(p, stream.Next().tile);
  const bool is_active = first_row < rows && first_key < kKeys;
  auto row_of = [&](const Step& step, int a, int r) {
    return DecodeRow(p, step.tile, step.kv_head, min(row0 + 16 * a + 8 * r, rows - 1));
  };

  // What is needed of q is on its way while the first step is.
  const Logits logits(p, stream.Next().kv_head * p.group_size);
  uint32_t q[kAtoms][kHeadDim / 16][4];
#pragma unroll
  for (int a = 0; a < kAtoms; ++a)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Step& step = stream.Next();
      const T* source = static_cast<const T*>(p.q) + row_of(step, a, r).Element(p, step.tile, p.head_dim);
      const bool is_there = row0 + 16 * a + 8 * r < rows;
#pragma unroll
      for (int kk = 0; kk < kHeadDim / 16; ++kk)
        Product::LoadQ(q[a][kk], source, kk, r, is_there, static_cast<int>(p.head_dim));
    }
  KeyRange seen_by_all;
  {
    const Step& step = stream.Next();
    const auto query_of = [&](int row) { return DecodeRow(p, step.tile, 0, row).query; };
    seen_by_all = {VisibleTo(p, step.tile, query_of(rows - 1)).lo, VisibleTo(p, step.tile, query_of(0)).hi};
  }
  float acc_o[kAtoms][kHeadDim / 8][4] = {};
  SoftmaxState state[kAtoms];

  for (bool is_last = false; !is_last;) {
    stream.Advance();
    const Step& step = stream.Current();
    is_last = step.left == 0;
    if (!is_active) continue;

    const uint32_t smem_k = ptx::SmemAddress(stream.Stage()), smem_v = smem_k + stream.kHalfBytes;
    const uint32_t address_k = AddressB<Product::kColumns>(smem_k, first_key);
    const uint32_t address_v = AddressA<Product::kColumns>(smem_v, first_key);
#pragma unroll 1
    for (int n0 = 0; n0 < kWarpKeys; n0 += kKeysAtOnce) {
      float acc_s[kAtoms][kKeysAtOnce / 8][4];
      Product::Logits(acc_s, q, address_k + n0 * (2 * Product::kColumns));

      const int key0 = step.key0 + first_key + n0, column = key0 + 2 * (lane % 4);
      if (!logits.plain) {
#pragma unroll
        for (int a = 0; a < kAtoms; ++a) {
          ScaleLogits(acc_s[a], logits, p.softcap);
          if (!p.alibi_slopes) continue;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const DecodeRow row = row_of(step, a, r);
            const float slope = row.Slope(p, step.tile);
            const int distance = row.query + Shift(step.tile) - column;
#pragma unroll
            for (int n = 0; n < kKeysAtOnce / 8; ++n)
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                float& x = acc_s[a][n][2 * r + c];
                x = fmaf(-slope, static_cast<float>(abs(distance - 8 * n - c)), x);
              }
          }
        }
      }
      if (key0 < seen_by_all.lo || key0 + kKeysAtOnce > seen_by_all.hi) {
#pragma unroll
        for (int a = 0; a < kAtoms; ++a)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const KeyRange seen = VisibleTo(p, step.tile, row_of(step, a, r).query);
            const int lo = seen.lo - column, hi = seen.hi - column;
#pragma unroll
            for (int n = 0; n < kKeysAtOnce / 8; ++n)
#pragma unroll
              for (int c = 0; c < 2; ++c)
                if (8 * n + c < lo || 8 * n + c >= hi) acc_s[a][n][2 * r + c] = -INFINITY;
          }
      }
      float2 rescale[kAtoms];
      bool grew = false;
#pragma unroll
      for (int a = 0; a < kAtoms; ++a) {
        rescale[a] = UpdateMax(acc_s[a], state[a], logits.exponent_scale);
        grew |= rescale[a].x != 1.f || rescale[a].y != 1.f;
      }
      if (__any_sync(~0u, grew)) {
#pragma unroll
        for (int a = 0; a < kAtoms; ++a)
#pragma unroll
          for (int d = 0; d < kHeadDim / 8; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc_o[a][d][e] *= e < 2 ? rescale[a].x : rescale[a].y;
      }
      Product::template Output<kKeysAtOnce / 16>(
          acc_o,
          [&](uint32_t (&fragment)[4], int a, int kk) {
            Probabilities<T>(fragment, acc_s[a][2 * kk], acc_s[a][2 * kk + 1], state[a], logits.exponent_scale);
          },
          address_v + n0 * (2 * Product::kColumns));
    }
  }

  const Step& step = stream.Current();
  float row_max[kAtoms][2], row_sum[kAtoms][2];
#pragma unroll
  for (int a = 0; a < kAtoms; ++a)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[a][r] = QuadSum(state[a].row_sum[r]);
      row_max[a][r] = row_sum[a][r] == 0.f ? -INFINITY : state[a].shift[r];
    }
  if constexpr (kKeyWarps == 1) {
#pragma unroll
    for (int a = 0; a < kAtoms; ++a)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row0 + 16 * a + 8 * r;
        if (row < rows)
          StoreDecodeRow<T, Product>(p, step, partials, row, row_max[a][r], row_sum[a][r], 0, kHeadDim / 8,
                                     [&](int d) { return Product::Values(acc_o[a], r, d); });
      }
  } else {
    // Warps of the same rows meet where the last step's keys and values were: nobody reads these any more, and the next copy to
    // there starts after the next barrier of the stream. Columns take turns, as many as there is room for.
    constexpr int kPieces = kKeys / kWarpKeys, kRows = kRowWarps * kWarpRows;
    constexpr int kRounds = kPieces * kRows * kHeadDim * sizeof(float) / stream.kStageBytes;
    constexpr int kColumns = kHeadDim / kRounds, kColumnAtoms = kColumns / 8;  // of a round
    static_assert(kColumnAtoms % kKeyWarps == 0 && kPieces * kRows * sizeof(float) <= sizeof(stream.shared.states));
    float* const pieces = reinterpret_cast<float*>(stream.Stage());
    float* const lse = reinterpret_cast<float*>(stream.shared.states);
    // Eight columns of four rows lie in different banks.
    auto place = [&](int piece, int row, int d) {
      return &pieces[(piece * kRows + row) * kColumns + ((Product::Column(d) % kColumns) ^ (row * 8 % min(kColumns, 32)))];
    };
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      __syncthreads();
#pragma unroll
      for (int a = 0; a < kAtoms; ++a)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = row0 + 16 * a + 8 * r;
          if (row >= rows || !is_active) continue;
          const float scale = row_sum[a][r] == 0.f ? 0.f : 1.f / row_sum[a][r];
          if (lane % 4 == 0)
            lse[key_warp * kRows + row] = row_sum[a][r] == 0.f ? -INFINITY : row_max[a][r] + ptx::Log2(row_sum[a][r]);
#pragma unroll
          for (int d = round * kColumnAtoms; d < (round + 1) * kColumnAtoms; ++d) {
            const float2 x = Product::Values(acc_o[a], r, d);
            *reinterpret_cast<float2*>(place(key_warp, row, d)) = {x.x * scale, x.y * scale};
          }
        }
      __syncthreads();
      // Each merges some of the columns.
      for (int row = row0; row < min(rows, first_row + kWarpRows); row += 8) {
        float top = -INFINITY, factor[kPieces], sum = 0.f;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) top = fmaxf(top, lse[i * kRows + row]);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const float of_piece = lse[i * kRows + row];
          factor[i] = of_piece == -INFINITY ? 0.f : ptx::Exp2(of_piece - top);
          sum += factor[i];
        }
        const int d_begin = round * kColumnAtoms + key_warp * (kColumnAtoms / kKeyWarps);
        StoreDecodeRow<T, Product>(p, step, partials, row, top, sum, d_begin, d_begin + kColumnAtoms / kKeyWarps, [&](int d) {
          float2 x = {0.f, 0.f};
#pragma unroll
          for (int i = 0; i < kPieces; ++i) {
            const float2 y = *reinterpret_cast<const float2*>(place(i, row, d));
            x = {fmaf(y.x, factor[i], x.x), fmaf(y.y, factor[i], x.y)};
          }
          return x;
        });
      }
    }
  }
}

template <typename T, typename E, typename Config>
__global__ __launch_bounds__(Config::kThreads, kDecodeCtas) void decode_kernel(const __grid_constant__ FwdParams p,
                                                                               const __grid_constant__ DecodeList list,
                                                                               const __grid_constant__ Partials partials) {
  extern __shared__ __align__(512) uint8_t smem[];
  __shared__ DecodeShared<Config> shared;
  ptx::WaitForPrerequisites();
  Stream<E, Config> stream(p, list, shared, smem, partials.rows);
  while (stream.Next().left != kNoStep) {
    if (RowsOf(p, stream.Next().tile) <= 16) {
      ComputeSegment<T, E, Config, 1, 1>(p, partials, stream);
    } else {
      ComputeSegment<T, E, Config, kDecodeRows / 16 / Config::kAtoms, Config::kAtoms>(p, partials, stream);
    }
    const Step& step = stream.Current();
    if (!step.IsWhole())
      Combine<T, Config::kThreads>(p, step.tile, step.kv_head, partials, step.slot_rows, step.first_part, step.last_part,
                                   step.part, shared.states);
  }
}

template <typename T, typename E, typename Config>
cudaError_t LaunchDecodeAs(const FwdParams& params, const DecodeList& list, const Partials& partials, cudaStream_t stream) {
  const auto kernel = decode_kernel<T, E, Config>;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes))
    return error;
  return LaunchDependent(kernel, partials.shares, Config::kThreads, Config::kSmemBytes, stream, params, list, partials);
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
