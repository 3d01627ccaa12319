// The backward kernel of the portable family: mma.sync and cp.async, compute capability 8.0 and later.
//
// One CTA owns a tile of keys of one kv head and meets, step by step, the tiles of q of every query head of the group that see
// any of them. With S^T = K Q^T and dP^T = V dO^T, keys are the rows of all accumulators, and P^T and dS^T are, in registers,
// already the A operands of dV += P^T dO and dK += dS^T Q. Half of the warps compute P and dV, the other half dP, dS and dK:
// both do the same two products, on other tiles, and the exponentials of the one half run beside the products of the other.
// P passes from thread to thread through shared memory. dS goes there as well, for dQ += dS K, which all warps compute and add
// to device memory.
#pragma once

#include "params.h"
#include "schedule.h"
#include "sequence.cuh"
#include "softmax.cuh"
#include "tile_config.h"
#include "tile_io.cuh"
#include "tile_mma.cuh"

namespace jax_varlen {

// What keeps the order of additions to dq where gradients must repeat bit for bit: null, or (num_heads, tiles) counters, zero
// at first, of how many tiles of keys have been added to each tile of dq.
struct Turns {
  int32_t* counts;
  int64_t tiles;
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

// Hides what a query does not see: rows are keys from `key` on, columns queries from `query` on.
template <int kN>
__device__ __forceinline__ void MaskTransposed(float (&acc)[kN][4], const FwdParams& p, const Tile& tile, int key, int query) {
  const int left = p.window_left == kUnbounded ? INT_MIN : -static_cast<int>(p.window_left);
  const int right = p.window_right == kUnbounded ? INT_MAX : static_cast<int>(p.window_right);
  const int offset = key - (query + Shift(tile)) - 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const bool counts = key + 8 * (e / 2) < tile.k_used;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int distance = offset + 8 * (e / 2) - 8 * n - e % 2;
      if (!counts || distance < left || distance > right) acc[n][e] = -INFINITY;
    }
  }
}

template <typename T, typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void bwd_sm80_kernel(const __grid_constant__ BwdParams params,
                                                                       const __grid_constant__ WorkList list,
                                                                       const __grid_constant__ Turns turns) {
  constexpr int kHeadDim = Config::kHeadDim, kTileM = Config::kTileM, kTileN = Config::kTileN, kAtoms = Config::kAtoms;
  constexpr int kStages = Config::kStages, kThreads = Config::kThreads, kGroupThreads = Config::kGroupThreads;
  constexpr uint32_t kBytesK = 2 * kHeadDim * kTileN, kBytesQ = 2 * kHeadDim * kTileM, kBytesP = 2 * kTileM * kTileN;
  constexpr int kBarrierP = 1;
  const FwdParams& p = params.fwd;

  // Shared memory.
  extern __shared__ __align__(128) uint8_t smem_base[];
  __shared__ Tile tile;
  const uint32_t smem_k = ptx::SmemAddress(smem_base), smem_v = smem_k + kBytesK, smem_q = smem_v + kBytesK;
  const uint32_t smem_dout = smem_q + kStages * kBytesQ, smem_p = smem_dout + kStages * kBytesQ, smem_ds = smem_p + kBytesP;
  const uint32_t smem_lse = smem_ds + kBytesP, smem_delta = smem_lse + kStages * kTileM * 4;

  // Roles.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool is_ds = threadIdx.x >= kGroupThreads;
  const int warp_key = (warp % (kGroupThreads / 32)) * 16 * kAtoms, thread_key = warp_key + lane / 4;
  const int warp_q = warp % Config::kQWarps, warp_column = warp / Config::kQWarps * Config::kQColumns;
  const int group_size = static_cast<int>(p.num_heads / p.num_kv_heads);

  const int64_t items = *list.count * p.num_kv_heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    if (threadIdx.x < kWordsPerTile)
      reinterpret_cast<int32_t*>(&tile)[threadIdx.x] =
          reinterpret_cast<const int32_t*>(&list.tiles[item / p.num_kv_heads])[threadIdx.x];
    __syncthreads();
    if (tile.sequence < 0) {
      __syncthreads();
      continue;
    }
    const int kv_head = static_cast<int>(item % p.num_kv_heads);
    const int64_t row_k = static_cast<int64_t>(tile.k_begin) + tile.row;

    // Steps: every tile of q that sees any key, for every query head of the group.
    const KeyRange queries = QueriesOfAny(p, tile, tile.row, kTileN);
    const int m_begin = queries.lo / kTileM, m_end = queries.lo < queries.hi ? (queries.hi + kTileM - 1) / kTileM : m_begin;
    const int steps_per_head = m_end - m_begin, steps = steps_per_head * group_size;

    auto copy_step = [&](int step) {
      const int head = kv_head * group_size + step / steps_per_head, m = m_begin + step % steps_per_head;
      const int stage = step % kStages, rows = tile.q_used - m * kTileM;
      const int64_t row = static_cast<int64_t>(tile.q_begin) + m * kTileM;
      CopyTile<kHeadDim, kThreads, kTileM>(smem_q + stage * kBytesQ,
                                           static_cast<const T*>(p.q) + (row * p.num_heads + head) * p.head_dim,
                                           p.num_heads * p.head_dim, 0, rows, p.head_dim);
      CopyTile<kHeadDim, kThreads, kTileM>(smem_dout + stage * kBytesQ,
                                           static_cast<const T*>(params.dout) + (row * p.num_heads + head) * p.head_dim_v,
                                           p.num_heads * p.head_dim_v, 0, rows, p.head_dim_v);
      const int i = threadIdx.x % kTileM;
      if (threadIdx.x < kTileM)
        ptx::CopyAsync4(smem_lse + (stage * kTileM + i) * 4, p.lse + head * p.total_q + row + i, i < rows);
      else if (threadIdx.x < 2 * kTileM)
        ptx::CopyAsync4(smem_delta + (stage * kTileM + i) * 4, params.delta + head * p.total_q + row + i, i < rows);
    };

    float acc[kAtoms][kHeadDim / 8][4] = {};  // dv or dk
    if (steps > 0) {
      const int rows = tile.k_used - tile.row;
      CopyTile<kHeadDim, kThreads, kTileN>(smem_k, static_cast<const T*>(p.k) + (row_k * p.num_kv_heads + kv_head) * p.head_dim,
                                           p.num_kv_heads * p.head_dim, 0, rows, p.head_dim);
      CopyTile<kHeadDim, kThreads, kTileN>(smem_v,
                                           static_cast<const T*>(p.v) + (row_k * p.num_kv_heads + kv_head) * p.head_dim_v,
                                           p.num_kv_heads * p.head_dim_v, 0, rows, p.head_dim_v);
      copy_step(0);
      ptx::CommitCopies();
    }

    for (int step = 0; step < steps; ++step) {
      const int head = kv_head * group_size + step / steps_per_head, m = m_begin + step % steps_per_head;
      const int stage = step % kStages, query0 = m * kTileM;
      const uint32_t tile_q = smem_q + stage * kBytesQ, tile_dout = smem_dout + stage * kBytesQ;

      // This step's tiles are there, and nobody reads the last step's any more.
      ptx::WaitCopies<0>();
      __syncthreads();
      if (kStages > 1 && step + 1 < steps) copy_step(step + 1);
      ptx::CommitCopies();

      // S^T = K Q^T, or dP^T = V dO^T.
      float acc_s[kAtoms][kTileM / 8][4];
      const uint32_t tile_a = is_ds ? smem_v : smem_k;
      MultiplyTransposed<T, kHeadDim, Config::kPrefetch>(
          acc_s, [&](uint32_t (&fragment)[4], int a, int kk) { LoadA<kHeadDim>(fragment, tile_a, warp_key + 16 * a, kk); },
          is_ds ? tile_dout : tile_q);

      uint32_t fragments[kAtoms][kTileM / 16][4];  // P^T or dS^T, rounded
      const uint32_t exchange = smem_p + threadIdx.x % kGroupThreads * 16;
      if (!is_ds) {
        const Logits logits(p, tile, head);
        const int key0 = tile.row, last_query = min(query0 + kTileM, tile.q_used) - 1;
        const bool masked =
            key0 + kTileN > min(VisibleTo(p, tile, query0).hi, tile.k_used) || key0 < VisibleTo(p, tile, last_query).lo;
#pragma unroll
        for (int kk = 0; kk < kTileM / 16; ++kk) {
          float lse_log2[4];  // of the thread's columns
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 x = ptx::LoadSharedFloat2(smem_lse + (stage * kTileM + 16 * kk + 8 * i + 2 * (lane % 4)) * 4);
            // A query that sees no key has lse -inf, and no probability.
            lse_log2[2 * i] = x.x == -INFINITY ? INFINITY : x.x * kLog2e;
            lse_log2[2 * i + 1] = x.y == -INFINITY ? INFINITY : x.y * kLog2e;
          }
#pragma unroll
          for (int a = 0; a < kAtoms; ++a) {
            float (&s)[2][4] = *reinterpret_cast<float (*)[2][4]>(&acc_s[a][2 * kk]);
            float slope_of_cap[2][4];
            const int key = key0 + thread_key + 16 * a, query = query0 + 16 * kk;
            if (!logits.plain) {
              ScaleLogits(s, logits, p.softcap);
              if (p.softcap != 0.f) {
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                  for (int e = 0; e < 4; ++e) slope_of_cap[n][e] = 1.f - (s[n][e] / p.softcap) * (s[n][e] / p.softcap);
              }
              AddAlibi(s, logits, key - (query + Shift(tile)));
            }
            if (masked) MaskTransposed(s, p, tile, key, query);
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
              for (int e = 0; e < 4; ++e) s[n][e] = ptx::Exp2(fmaf(s[n][e], logits.exponent_scale, -lse_log2[2 * n + e % 2]));
            PackAtoms<T>(fragments[a][kk], s[0], s[1]);
            const uint32_t place = exchange + (a * (kTileM / 16) + kk) * kGroupThreads * 16;
            if (p.softcap == 0.f) {
              ptx::StoreShared16(place, fragments[a][kk]);
            } else {
              uint32_t with_slope[4];
#pragma unroll
              for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[n][e] *= slope_of_cap[n][e];
              PackAtoms<T>(with_slope, s[0], s[1]);
              ptx::StoreShared16(place, with_slope);
            }
          }
        }
        ptx::BarrierArrive(kBarrierP, kThreads);
      } else {
        ptx::BarrierSync(kBarrierP, kThreads);
#pragma unroll
        for (int kk = 0; kk < kTileM / 16; ++kk) {
          float2 delta[2];
#pragma unroll
          for (int i = 0; i < 2; ++i)
            delta[i] = ptx::LoadSharedFloat2(smem_delta + (stage * kTileM + 16 * kk + 8 * i + 2 * (lane % 4)) * 4);
#pragma unroll
          for (int a = 0; a < kAtoms; ++a) {
            const int4 words = ptx::LoadShared16(exchange + (a * (kTileM / 16) + kk) * kGroupThreads * 16);
            const uint32_t pairs[4] = {static_cast<uint32_t>(words.x), static_cast<uint32_t>(words.y),
                                       static_cast<uint32_t>(words.z), static_cast<uint32_t>(words.w)};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float (&dp)[4] = acc_s[a][2 * kk + e / 2];
              const float2 probability = ptx::Unpack2<T>(pairs[e]);
              fragments[a][kk][e] = ptx::Pack2<T>(probability.x * (dp[e % 2 * 2] - delta[e / 2].x),
                                                  probability.y * (dp[e % 2 * 2 + 1] - delta[e / 2].y));
              const int row = warp_key + 16 * a + lane / 4 + 8 * (e % 2);
              ptx::StoreShared4(smem_ds + SmemOffset<kTileM>(row, 2 * kk + e / 2) + lane % 4 * 4, fragments[a][kk][e]);
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
          is_ds ? tile_q : tile_dout);
      __syncthreads();
      if (kStages == 1 && step + 1 < steps) {
        copy_step(step + 1);
        ptx::CommitCopies();
      }

      // dQ += dS K: 32 rows and kQColumns columns a warp.
      float acc_q[2][Config::kQColumns / 8][4] = {};
      Accumulate<T, kHeadDim, kTileN / 16>(
          acc_q,
          [&](uint32_t (&fragment)[4], int a, int kk) { LoadATransposed<kTileM>(fragment, smem_ds, 2 * warp_q + a, 16 * kk); },
          smem_k, warp_column / 16);
      int32_t* turn = nullptr;
      if (turns.counts) {
        turn = turns.counts + head * turns.tiles + tile.q_begin / kTileM + tile.sequence + m;
        const int mine = tile.row / kTileN - VisibleTo(p, tile, query0).lo / kTileN;
        // Offsets that overlap could wait for a turn that never comes: the wait has an end, and the bits are then anyone's.
        if (threadIdx.x == 0)
          for (int i = 0; i < (1 << 22) && ptx::LoadAcquire(turn) < mine; ++i) {
          }
        __syncthreads();
      }
      float* dq =
          static_cast<float*>(params.dq) + ((static_cast<int64_t>(tile.q_begin) + query0) * p.num_heads + head) * p.head_dim;
#pragma unroll
      for (int a = 0; a < 2; ++a)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = 32 * warp_q + 16 * a + 8 * r + lane / 4;
          if (query0 + row >= tile.q_used) continue;
#pragma unroll
          for (int n = 0; n < Config::kQColumns / 8; ++n) {
            const int column = warp_column + 8 * n + 2 * (lane % 4);
            if (column < p.head_dim)
              ptx::AddGlobal2(dq + row * p.num_heads * p.head_dim + column, acc_q[a][n][2 * r], acc_q[a][n][2 * r + 1]);
          }
        }
      if (turns.counts) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) ptx::StoreRelease(turn, ptx::LoadAcquire(turn) + 1);
      }
    }

    // dk and dv pass through the warp's own rows of K or V. Keys that do not count have gradient 0.
    __syncthreads();
    const float scale = is_ds ? *p.softmax_scale : 1.f;
    const int columns = static_cast<int>(is_ds ? p.head_dim : p.head_dim_v);
    T* gmem = static_cast<T*>(is_ds ? params.dk : params.dv) + (row_k * p.num_kv_heads + kv_head) * columns;
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
      StoreRows<kHeadDim>(gmem + atom_key * p.num_kv_heads * columns, p.num_kv_heads * columns,
                          tile.k_owned - tile.row - atom_key, columns, smem_rows);
    }
    __syncthreads();
  }
}

template <typename T, typename Config>
cudaError_t LaunchBwdSm80As(const BwdParams& params, const WorkList& list, const Turns& turns, cudaStream_t stream) {
  constexpr int64_t kMaxGrid = 0x7fffffff;
  const Order order = turns.counts ? Order::kPacked : Order::kLongestFirst;
  if (cudaError_t error = LaunchSchedule(params.fwd, TilesOf::kKeys, Config::kTileN, Config::kTileM, order, list, stream))
    return error;
  const auto kernel = bwd_sm80_kernel<T, Config>;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes))
    return error;
  const int64_t tiles = MaxTiles(params.fwd.total_k, params.fwd.batch, turns.counts ? 64 : Config::kTileN);
  const int64_t items = tiles * params.fwd.num_kv_heads;
  kernel<<<static_cast<int>(items < kMaxGrid ? items : kMaxGrid), Config::kThreads, Config::kSmemBytes, stream>>>(params, list,
                                                                                                                  turns);
  return cudaGetLastError();
}

}  // namespace jax_varlen
