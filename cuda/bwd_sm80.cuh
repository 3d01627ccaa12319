// The backward kernel of the portable family: mma.sync and cp.async, compute capability 8.0 and later.
//
// One CTA owns a tile of keys of one kv head and meets, step by step, the tiles of q of every query head of the group that see
// any of them. With S^T = K Q^T and dP^T = V dO^T, keys are the rows of all accumulators, and P^T and dS^T are, in registers,
// already the A operands of dV += P^T dO and dK += dS^T Q. Half of the warps compute P and dV, the other half dS and dK: both
// do the same two products, on other tiles. P passes from thread to thread through shared memory; dS goes there as well, for dQ
// += dS K, which all warps compute one step later and add to device memory. The two halves do so at different times, so that
// the exponentials of the one run beside the products of the other:
//
//   P warps    S(i)               P(i)   dV(i)           dQ(i - 1)
//   dS warps   dQ(i - 1)   dP(i)         dS(i)   dK(i)
#pragma once

#include "bwd_sm80.h"
#include "params.h"
#include "schedule.h"
#include "sequence.cuh"
#include "softmax.cuh"
#include "tile_config.h"
#include "tile_io.cuh"
#include "tile_mma.cuh"

namespace jax_varlen {

// The query heads of a kv head.
struct HeadRange {
  int begin, end;
};

// One step of the loop: a tile of q of one query head. Tiles pass from the last to the first. Where a causal mask leaves later
// keys fewer of them, all CTAs of a sequence so begin with those that they share, and their turns come with little waiting.
struct Step {
  int head, m;

  __device__ __forceinline__ Step Next(const HeadRange& heads) const {
    return head + 1 < heads.end ? Step{head + 1, m} : Step{heads.begin, m - 1};
  }

  __device__ __forceinline__ Step Previous(const HeadRange& heads) const {
    return head > heads.begin ? Step{head - 1, m} : Step{heads.end - 1, m + 1};
  }
};

// The A operand of a step (16 columns) from two atoms of an accumulator.
template <typename T>
__device__ __forceinline__ void PackAtoms(uint32_t (&fragment)[4], const float (&left)[4], const float (&right)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float (&s)[4] = e < 2 ? left : right;
    fragment[e] = ptx::Pack2<T>(s[e % 2 * 2], s[e % 2 * 2 + 1]);
  }
}

// Hides what a query does not see: rows are keys from `key` on, columns queries from `query` on. Queries that do not count are
// hidden too: their zeros meet a bias that may be large.
template <int kN>
__device__ __forceinline__ void MaskTransposed(float (&acc)[kN][4], const FwdParams& p, const Tile& tile, int key, int query) {
  const int left = p.window_left == kUnbounded ? INT_MIN : -static_cast<int>(p.window_left);
  const int right = p.window_right == kUnbounded ? INT_MAX : static_cast<int>(p.window_right);
  const int column = query + 2 * static_cast<int>(threadIdx.x % 4), offset = key - column - Shift(tile);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const bool counts = key + 8 * (e / 2) < tile.k_used;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int distance = offset + 8 * (e / 2) - 8 * n - e % 2;
      if (!counts || distance < left || distance > right || column + 8 * n + e % 2 >= tile.q_used) acc[n][e] = -INFINITY;
    }
  }
}

// P^T from S^T, in place, for a tile of q whose first row is `query`; `key` is the thread's first. With a softcap, its slope at
// each logit waits, rounded, where P goes in the exchange between the two halves.
template <typename T, int kAtoms, int kN>
__device__ __forceinline__ void ComputeP(float (&acc_s)[kAtoms][kN][4], const FwdParams& p, const Tile& tile,
                                         const Logits& logits, int key, int query, bool masked, uint32_t smem_lse,
                                         uint32_t exchange, uint32_t step_bytes) {
  if (!logits.plain) {
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
      ScaleLogits(acc_s[a], logits, p.softcap);
      if (p.softcap != 0.f) {
        const float inverse = 1.f / p.softcap;
#pragma unroll
        for (int kk = 0; kk < kN / 2; ++kk) {
          uint32_t slopes[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float x = acc_s[a][2 * kk + e / 2][e % 2 * 2] * inverse,
                        y = acc_s[a][2 * kk + e / 2][e % 2 * 2 + 1] * inverse;
            slopes[e] = ptx::Pack2<T>(1.f - x * x, 1.f - y * y);
          }
          ptx::StoreShared16(exchange + (a * (kN / 2) + kk) * step_bytes, slopes);
        }
      }
      AddAlibi(acc_s[a], logits, key + 16 * a - (query + Shift(tile)));
    }
  }
  if (masked) {
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) MaskTransposed(acc_s[a], p, tile, key + 16 * a, query);
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 lse = ptx::LoadSharedFloat2(smem_lse + 32 * n);
    // A query all of whose logits are -inf has lse -inf, and no probability.
    const float shift[2] = {lse.x == -INFINITY ? -INFINITY : -lse.x * kLog2e, lse.y == -INFINITY ? -INFINITY : -lse.y * kLog2e};
#pragma unroll
    for (int a = 0; a < kAtoms; ++a)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_s[a][n][e] = ptx::Exp2(fmaf(acc_s[a][n][e], logits.exponent_scale, shift[e % 2]));
  }
}

template <typename T, typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void bwd_sm80_kernel(const __grid_constant__ BwdParams params,
                                                                       const __grid_constant__ WorkList list,
                                                                       const __grid_constant__ Turns turns) {
  constexpr int kHeadDim = Config::kHeadDim, kTileM = Config::kTileM, kTileN = Config::kTileN, kAtoms = Config::kAtoms;
  constexpr int kStages = Config::kStages, kThreads = Config::kThreads, kGroupThreads = Config::kGroupThreads;
  constexpr uint32_t kBytesK = 2 * kHeadDim * kTileN, kBytesQ = 2 * kHeadDim * kTileM, kBytesP = 2 * kTileM * kTileN;
  constexpr int kBarrierP = 1, kBarrierTurn = 2;  // and 3; 0 is __syncthreads
  const FwdParams& p = params.fwd;
  const int num_heads = static_cast<int>(p.num_heads), num_kv_heads = static_cast<int>(p.num_kv_heads);
  const int head_dim = static_cast<int>(p.head_dim), head_dim_v = static_cast<int>(p.head_dim_v),
            group_size = num_heads / num_kv_heads;

  // Shared memory.
  extern __shared__ __align__(512) uint8_t smem_base[];  // rows of tiles are up to 512 bytes
  __shared__ Tile tile;
  const uint32_t smem_k = ptx::SmemAddress(smem_base), smem_v = smem_k + kBytesK, smem_q = smem_v + kBytesK;
  const uint32_t smem_dout = smem_q + kStages * kBytesQ, smem_p = smem_dout + kStages * kBytesQ, smem_ds = smem_p + kBytesP;
  const uint32_t smem_lse = smem_ds + 2 * kBytesP, smem_delta = smem_lse + kStages * kTileM * 4;

  // Roles.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool is_ds = threadIdx.x >= kGroupThreads;
  const int warp_key = warp % (kGroupThreads / 32) * 16 * kAtoms, thread_key = warp_key + lane / 4;
  const int warp_q = warp % Config::kQWarps, warp_column = warp / Config::kQWarps * Config::kQColumns;
  const uint32_t address_kv = AddressA<kHeadDim>(is_ds ? smem_v : smem_k, warp_key);
  const uint32_t address_ds = At(AddressB<kTileM>(smem_ds, 0), 2 * warp_q);
  const uint32_t address_k = At(AddressA<kHeadDim>(smem_k, 0), warp_column / 16);
  const uint32_t exchange = smem_p + threadIdx.x % kGroupThreads * 16;

  for (int64_t item = blockIdx.x; item < *list.count * p.num_kv_heads; item += gridDim.x) {
    if (threadIdx.x < kWordsPerTile)
      reinterpret_cast<int32_t*>(&tile)[threadIdx.x] =
          reinterpret_cast<const int32_t*>(&list.tiles[item / num_kv_heads])[threadIdx.x];
    __syncthreads();
    const int kv_head = static_cast<int>(item % num_kv_heads);
    const int64_t row_k = static_cast<int64_t>(tile.k_begin) + tile.row;

    // Steps: every tile of q that sees any key, for every query head of the group.
    const KeyRange queries = QueriesOfAny(p, tile, tile.row, kTileN);
    const int last_m = (queries.hi - 1) / kTileM;
    const int steps = queries.lo < queries.hi ? (last_m + 1 - queries.lo / kTileM) * group_size : 0;
    const HeadRange heads = {kv_head * group_size, (kv_head + 1) * group_size};

    // Rows that see no key arrive as zeros, so that nothing of theirs, NaN included, reaches a product.
    auto copy_step = [&](const Step& step, int stage) {
      const int row_lo = FirstQuery(p, tile, 0) - step.m * kTileM, row_hi = tile.q_used - step.m * kTileM;
      const int64_t row = static_cast<int64_t>(tile.q_begin) + step.m * kTileM, head_row = row * num_heads + step.head;
      CopyTile<kHeadDim, kThreads, kTileM>(smem_q + stage * kBytesQ, static_cast<const T*>(p.q) + head_row * head_dim,
                                           num_heads * p.head_dim, row_lo, row_hi, head_dim);
      CopyTile<kHeadDim, kThreads, kTileM>(smem_dout + stage * kBytesQ,
                                           static_cast<const T*>(params.dout) + head_row * head_dim_v, num_heads * p.head_dim_v,
                                           row_lo, row_hi, head_dim_v);
      const int i = threadIdx.x % kTileM;
      const bool is_lse = threadIdx.x < kTileM;
      if (threadIdx.x < 2 * kTileM)
        ptx::CopyAsync4((is_lse ? smem_lse : smem_delta) + (stage * kTileM + i) * 4,
                        (is_lse ? p.lse : params.delta) + step.head * p.total_q + row + i, row_lo <= i && i < row_hi);
    };

    // Additions to a tile of dq in the order of the tiles of keys, each half of the warps by itself. The list has the tiles of
    // a sequence in that order, so that a CTA waits only for some that have started. A turn ends one step after its additions,
    // when they are done and the fence need not wait.
    auto turn_of = [&](const Step& step) {
      return turns.counts + (step.head * turns.tiles + tile.q_begin / kTileM + tile.sequence + step.m) * 2 + is_ds;
    };
    auto end_turn = [&](const Step& step) {
      __threadfence();
      ptx::BarrierSync(kBarrierTurn + is_ds, kGroupThreads);
      if (threadIdx.x % kGroupThreads == 0) ptx::AddRelease(turn_of(step), 1);
    };
    auto wait_for_turn = [&](const Step& step) {
      if (threadIdx.x % kGroupThreads == 0) {
        const int before = tile.row / kTileN - VisibleTo(p, tile, step.m * kTileM).lo / kTileN;
        while (ptx::LoadAcquire(turn_of(step)) < before) {
        }
      }
      ptx::BarrierSync(kBarrierTurn + is_ds, kGroupThreads);
    };

    // dQ += dS K: 32 rows and kQColumns columns a warp.
    auto add_dq = [&](const Step& step, int i) {
      float acc_q[2][Config::kQColumns / 8][4] = {};
      Accumulate<T, kHeadDim, kTileN / 16>(
          acc_q,
          [&](uint32_t (&fragment)[4], int a, int kk) {
            ptx::LoadMatrix4Transposed(fragment, At(address_ds + i % 2 * kBytesP, a) + kk * (32 * kTileM));
          },
          address_k);

      if (turns.counts) {
        if (i > 0) end_turn(step.Previous(heads));
        wait_for_turn(step);
      }
      const int row0 = step.m * kTileM + 32 * warp_q + lane / 4, column0 = warp_column + 2 * (lane % 4);
      const int64_t row_stride = static_cast<int64_t>(num_heads) * head_dim;
      float* dq = static_cast<float*>(params.dq) + (static_cast<int64_t>(tile.q_begin) + row0) * row_stride +
                  step.head * head_dim + column0;
      const int columns = head_dim - column0;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const bool counts = row0 + 8 * r < tile.q_used;
#pragma unroll
        for (int n = 0; n < Config::kQColumns / 8; ++n)
          if (counts && 8 * n < columns)
            ptx::AddGlobal2(dq + 8 * n, acc_q[r / 2][n][r % 2 * 2], acc_q[r / 2][n][r % 2 * 2 + 1]);
        dq += 8 * row_stride;
      }
    };

    float acc[kAtoms][kHeadDim / 8][4] = {};  // dv or dk
    Step step = {heads.begin, last_m};
    if (steps > 0) {
      const int rows = tile.k_used - tile.row;
      const int64_t head_row = row_k * num_kv_heads + kv_head;
      CopyTile<kHeadDim, kThreads, kTileN>(smem_k, static_cast<const T*>(p.k) + head_row * head_dim, num_kv_heads * p.head_dim,
                                           0, rows, head_dim);
      CopyTile<kHeadDim, kThreads, kTileN>(smem_v, static_cast<const T*>(p.v) + head_row * head_dim_v,
                                           num_kv_heads * p.head_dim_v, 0, rows, head_dim_v);
      copy_step(step, 0);
      ptx::CommitCopies();
    }

    for (int i = 0; i < steps; ++i) {
      const int stage = i % kStages;
      const uint32_t tile_q = smem_q + stage * kBytesQ, tile_dout = smem_dout + stage * kBytesQ;

      // This step's tiles are there, and nobody reads the last step's any more.
      ptx::WaitCopies<0>();
      __syncthreads();
      if (kStages > 1 && i + 1 < steps) copy_step(step.Next(heads), (i + 1) % kStages);
      ptx::CommitCopies();
      if (is_ds && i > 0) add_dq(step.Previous(heads), i - 1);

      // S^T = K Q^T, or dP^T = V dO^T.
      float acc_s[kAtoms][kTileM / 8][4];
      MultiplyTransposed<T, kHeadDim, Config::kPrefetch>(
          acc_s,
          [&](uint32_t (&fragment)[4], int a, int kk) { ptx::LoadMatrix4(fragment, At(address_kv, kk) + a * (32 * kHeadDim)); },
          AddressB<kHeadDim>(is_ds ? tile_dout : tile_q, 0));

      uint32_t fragments[kAtoms][kTileM / 16][4];  // P^T or dS^T, rounded
      if (!is_ds) {
        const Logits logits(p, tile, step.head);
        const int query0 = step.m * kTileM, last_query = min(query0 + kTileM, tile.q_used) - 1;
        const bool masked = query0 + kTileM > tile.q_used || tile.row + kTileN > VisibleTo(p, tile, query0).hi ||
                            tile.row + kTileN > tile.k_used || tile.row < VisibleTo(p, tile, last_query).lo;
        constexpr uint32_t kStepBytes = kGroupThreads * 16;
        ComputeP<T>(acc_s, p, tile, logits, tile.row + thread_key, query0, masked,
                    smem_lse + (stage * kTileM + 2 * (lane % 4)) * 4, exchange, kStepBytes);
#pragma unroll
        for (int a = 0; a < kAtoms; ++a)
#pragma unroll
          for (int kk = 0; kk < kTileM / 16; ++kk) PackAtoms<T>(fragments[a][kk], acc_s[a][2 * kk], acc_s[a][2 * kk + 1]);
        // What dS needs of P is, with a softcap, P times the slope of the cap.
#pragma unroll
        for (int a = 0; a < kAtoms; ++a)
#pragma unroll
          for (int kk = 0; kk < kTileM / 16; ++kk) {
            const uint32_t place = exchange + (a * (kTileM / 16) + kk) * kStepBytes;
            uint32_t words[4];
            if (p.softcap != 0.f) ptx::LoadShared16(words, place);
#pragma unroll
            for (int e = 0; e < 4; ++e)
              words[e] = p.softcap != 0.f ? ptx::Multiply2<T>(words[e], fragments[a][kk][e]) : fragments[a][kk][e];
            ptx::StoreShared16(place, words);
          }
        ptx::BarrierArrive(kBarrierP, kThreads);
      } else {
        ptx::BarrierSync(kBarrierP, kThreads);
        const uint32_t place = smem_ds + i % 2 * kBytesP + SmemOffset<kTileM>(thread_key, 0) + lane % 4 * 4;
        const uint32_t delta_address = smem_delta + (stage * kTileM + 2 * (lane % 4)) * 4;
#pragma unroll
        for (int kk = 0; kk < kTileM / 16; ++kk) {
          const float2 delta[2] = {ptx::LoadSharedFloat2(delta_address + 64 * kk),
                                   ptx::LoadSharedFloat2(delta_address + 64 * kk + 32)};
#pragma unroll
          for (int a = 0; a < kAtoms; ++a) {
            uint32_t pairs[4];
            ptx::LoadShared16(pairs, exchange + (a * (kTileM / 16) + kk) * kGroupThreads * 16);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float (&dp)[4] = acc_s[a][2 * kk + e / 2];
              const float2 probability = ptx::Unpack2<T>(pairs[e]);
              fragments[a][kk][e] = ptx::Pack2<T>(probability.x * (dp[e % 2 * 2] - delta[e / 2].x),
                                                  probability.y * (dp[e % 2 * 2 + 1] - delta[e / 2].y));
              // Row thread_key + 16 a + 8 (e % 2), chunk 2 kk + e / 2.
              ptx::StoreShared4((place ^ (16 * (2 * kk + e / 2))) + (16 * a + 8 * (e % 2)) * 2 * kTileM, fragments[a][kk][e]);
            }
          }
        }
      }

      // dV += P^T dO, or dK += dS^T Q.
      Accumulate<T, kHeadDim, kTileM / 16>(
          acc,
          [&](uint32_t (&fragment)[4], int a, int kk) {
#pragma unroll
            for (int e = 0; e < 4; ++e) fragment[e] = fragments[a][kk][e];
          },
          AddressA<kHeadDim>(is_ds ? tile_q : tile_dout, 0));
      if constexpr (kStages == 1) {
        __syncthreads();
        if (i + 1 < steps) copy_step(step.Next(heads), 0);
        ptx::CommitCopies();
      }
      if (!is_ds && i > 0) add_dq(step.Previous(heads), i - 1);
      step = step.Next(heads);
    }
    __syncthreads();
    if (steps > 0) {
      add_dq(step.Previous(heads), steps - 1);
      if (turns.counts) end_turn(step.Previous(heads));
    }

    // dk and dv pass through the warp's own rows of K or V. Keys that do not count have gradient 0.
    __syncthreads();
    const float scale = is_ds ? *p.softmax_scale : 1.f;
    const int columns = is_ds ? head_dim : head_dim_v;
    const int64_t row_stride = static_cast<int64_t>(num_kv_heads) * columns;
    T* gmem = static_cast<T*>(is_ds ? params.dk : params.dv) + (row_k * num_kv_heads + kv_head) * columns;
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
      const int atom_key = warp_key + 16 * a;
      const uint32_t smem_rows = (is_ds ? smem_k : smem_v) + atom_key * 2 * kHeadDim;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        const bool counts = tile.row + atom_key + row < tile.k_used;
#pragma unroll
        for (int d = 0; d < kHeadDim / 8; ++d)
          ptx::StoreShared4(smem_rows + SmemOffset<kHeadDim>(row, d) + lane % 4 * 4,
                            counts ? ptx::Pack2<T>(acc[a][d][2 * r] * scale, acc[a][d][2 * r + 1] * scale) : 0);
      }
      __syncwarp();
      StoreRows<kHeadDim>(gmem + atom_key * row_stride, row_stride, tile.k_owned - tile.row - atom_key, columns, smem_rows);
    }
    __syncthreads();
  }
}

template <typename T, typename Config>
cudaError_t LaunchBwdSm80As(const BwdParams& params, const WorkList& list, const Turns& turns, cudaStream_t stream) {
  constexpr int64_t kMaxGrid = 0x7fffffff;
  if (cudaError_t error = LaunchSchedule(params.fwd, TilesOf::kKeys, Config::kTileN, Config::kTileM, list, stream))
    return error;
  const auto kernel = bwd_sm80_kernel<T, Config>;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes))
    return error;
  const int64_t items = MaxTiles(params.fwd.total_k, params.fwd.batch, Config::kTileN) * params.fwd.num_kv_heads;
  kernel<<<static_cast<int>(items < kMaxGrid ? items : kMaxGrid), Config::kThreads, Config::kSmemBytes, stream>>>(params, list,
                                                                                                                  turns);
  return cudaGetLastError();
}

template <typename T, typename Config, typename Small>
cudaError_t LaunchBwdSm80Fitting(const BwdParams& params, const WorkList& list, const Turns& turns, int smem_bytes,
                                 cudaStream_t stream) {
  if (Config::kSmemBytes + kStaticSmemBytes <= smem_bytes) return LaunchBwdSm80As<T, Config>(params, list, turns, stream);
  return LaunchBwdSm80As<T, Small>(params, list, turns, stream);
}

template <typename T>
cudaError_t LaunchBwdSm80(const BwdParams& params, const WorkList& list, const Turns& turns, int smem_bytes,
                          cudaStream_t stream) {
  const int64_t head_dim = params.fwd.head_dim > params.fwd.head_dim_v ? params.fwd.head_dim : params.fwd.head_dim_v;
  if (head_dim <= 64) return LaunchBwdSm80Fitting<T, BwdTile64, BwdTile64Small>(params, list, turns, smem_bytes, stream);
  if (head_dim <= 128) return LaunchBwdSm80Fitting<T, BwdTile128, BwdTile128Small>(params, list, turns, smem_bytes, stream);
  return LaunchBwdSm80Fitting<T, BwdTile256, BwdTile256Small>(params, list, turns, smem_bytes, stream);
}

}  // namespace jax_varlen
