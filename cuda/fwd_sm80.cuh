// The forward kernel of the portable family: mma.sync and cp.async, compute capability 8.0 and later.
//
// One CTA computes one tile of q rows of one head. Each warp owns 16 rows of every atom of the tile; K and V pass through
// shared memory from right to left, while the probabilities stay in registers: the accumulator of S = Q K^T, rounded, is the
// A operand of O += P V.
#pragma once

#include <type_traits>

#include "device.h"
#include "fwd_store.cuh"
#include "paged.cuh"
#include "params.h"
#include "schedule.h"
#include "sequence.cuh"
#include "softmax.cuh"
#include "tile_config.h"
#include "tile_io.cuh"
#include "tile_mma.cuh"

namespace jax_varlen {

// The fragments of Q, which stay in registers where there is room for them and else are read again for every tile of keys.
template <typename Config, int kAtoms>
struct QFragments {
  uint32_t kept[kAtoms][Config::kQInRegisters ? Config::kHeadDim / 16 : 1][4];
  uint32_t address;

  __device__ __forceinline__ void Load(uint32_t smem_q, int warp_row) {
    address = AddressA<Config::kHeadDim>(smem_q, warp_row);
    if constexpr (Config::kQInRegisters) {
#pragma unroll
      for (int a = 0; a < kAtoms; ++a)
#pragma unroll
        for (int kk = 0; kk < Config::kHeadDim / 16; ++kk) Read(kept[a][kk], a, kk);
    }
  }

  __device__ __forceinline__ void Read(uint32_t (&fragment)[4], int a, int kk) const {
    ptx::LoadMatrix4(fragment, At(address, kk) + a * (Config::kRowsPerAtom * 2 * Config::kHeadDim));
  }

  __device__ __forceinline__ void Get(uint32_t (&fragment)[4], int a, int kk) const {
    if constexpr (Config::kQInRegisters) {
#pragma unroll
      for (int e = 0; e < 4; ++e) fragment[e] = kept[a][kk][e];
    } else {
      Read(fragment, a, kk);
    }
  }
};

template <typename T, typename Config, bool kPaged, int kAtoms>
__device__ __forceinline__ void ComputeTile(const FwdParams& p, const Tile& tile, int head, uint32_t smem,
                                            PoolRows<Config::kTileN>* pool_rows) {
  const int row0 = tile.row;
  constexpr int kHeadDim = Config::kHeadDim, kTileN = Config::kTileN, kStages = Config::kStages;
  constexpr int kRows = kAtoms * Config::kRowsPerAtom;
  constexpr uint32_t kStageBytes = 2 * kHeadDim * kTileN;

  // Where things are.
  const uint32_t smem_q = smem, smem_k = smem_q + 2 * kHeadDim * Config::kTileM, smem_v = smem_k + kStages * kStageBytes;
  const int64_t kv_head = static_cast<int64_t>(tile.k_begin) * p.num_kv_heads + head / p.group_size;
  const T* gmem_q =
      static_cast<const T*>(p.q) + ((static_cast<int64_t>(tile.q_begin) + row0) * p.num_heads + head) * p.head_dim;
  const T* gmem_k = static_cast<const T*>(p.k) + kv_head * p.head_dim;
  const T* gmem_v = static_cast<const T*>(p.v) + kv_head * p.head_dim_v;
  const int warp_row = threadIdx.x / 32 * 16, thread_row = warp_row + threadIdx.x % 32 / 4;

  // Which tiles of keys are seen by any row, and which by all.
  const KeyRange any = VisibleToAny(p, tile, kRows), all = VisibleToAll(p, tile, kRows);
  const int n_begin = any.lo / kTileN, n_end = any.lo < any.hi ? (any.hi + kTileN - 1) / kTileN : n_begin;
  // A paged tile is looked up one step before it is copied.
  auto look_up = [&](int n) {
    if constexpr (kPaged)
      if (n >= n_begin) pool_rows[n % 2].LookUp(p, tile.sequence, n * kTileN, any);
  };
  auto copy_packed = [&](uint32_t stage, const T* gmem, int64_t columns, int n) {
    const int64_t stride = p.num_kv_heads * columns;
    CopyTile<kHeadDim, Config::kThreads, kTileN>(stage, gmem + n * kTileN * stride, stride, any.lo - n * kTileN,
                                                 any.hi - n * kTileN, columns);
  };
  auto copy = [&](int n, auto with_k, auto with_v) {
    const uint32_t stage_k = smem_k + n % kStages * kStageBytes, stage_v = smem_v + n % kStages * kStageBytes;
    if constexpr (kPaged) {
      CopyFromPool<T, kHeadDim, Config::kThreads, kTileN, with_k.value, with_v.value>(p, pool_rows[n % 2], head / p.group_size,
                                                                                      stage_k, stage_v);
    } else {
      if constexpr (with_k.value) copy_packed(stage_k, gmem_k, p.head_dim, n);
      if constexpr (with_v.value) copy_packed(stage_v, gmem_v, p.head_dim_v, n);
    }
  };
  constexpr std::true_type kWith;
  constexpr std::false_type kWithout;

  const Logits logits(p, tile, head);
  float acc_o[kAtoms][kHeadDim / 8][4] = {};
  SoftmaxState state[kAtoms];
  QFragments<Config, kAtoms> q;

  if (n_begin < n_end) {
    CopyTile<kHeadDim, Config::kThreads, kRows>(smem_q, gmem_q, p.num_heads * p.head_dim, 0, tile.q_used - row0, p.head_dim);
    if constexpr (kPaged) {
      look_up(n_end - 1);
      look_up(n_end - 2);
      ptx::CommitCopies();
      ptx::WaitCopies<0>();
      __syncthreads();
    }
    if constexpr (kStages == 1) {
      copy(n_end - 1, kWith, kWithout);
    } else {
      copy(n_end - 1, kWith, kWith);
    }
    ptx::CommitCopies();
    ptx::WaitCopies<0>();
    __syncthreads();
    q.Load(smem_q, warp_row);
  }

  // A warp whose rows are all beyond the end only copies.
  const bool active = row0 + warp_row < tile.q_used;
  for (int n = n_end - 1; n >= n_begin; --n) {
    float acc_s[kAtoms][kTileN / 8][4];

    // Tile n is there and nobody reads tile n + 1 any more.
    ptx::WaitCopies<0>();
    __syncthreads();
    if constexpr (kStages == 1) {
      copy(n, kWithout, kWith);
    } else {
      if (n > n_begin) copy(n - 1, kWith, kWith);
      look_up(n - 2);
    }
    ptx::CommitCopies();

    if (active)
      MultiplyTransposed<T, kHeadDim, true>(
          acc_s, [&](uint32_t (&fragment)[4], int a, int kk) { q.Get(fragment, a, kk); },
          AddressB<kHeadDim>(smem_k + n % kStages * kStageBytes, 0));

    if constexpr (kStages == 1) {
      ptx::WaitCopies<0>();
      __syncthreads();
      if (n > n_begin) copy(n - 1, kWith, kWithout);
      look_up(n - 2);
      ptx::CommitCopies();
    }

    if (active) {
      const int key0 = n * kTileN;
      if (!logits.plain) {
#pragma unroll
        for (int a = 0; a < kAtoms; ++a) {
          ScaleLogits(acc_s[a], logits, p.softcap);
          AddAlibi(acc_s[a], logits, row0 + a * Config::kRowsPerAtom + thread_row + Shift(tile) - key0);
        }
      }
      if (key0 < all.lo || key0 + kTileN > all.hi) {
#pragma unroll
        for (int a = 0; a < kAtoms; ++a) MaskLogits(acc_s[a], p, tile, row0 + a * Config::kRowsPerAtom + thread_row, key0);
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
      // The exponentials of a step of P fall between the products of the step before.
      Accumulate<T, kHeadDim, kTileN / 16>(
          acc_o,
          [&](uint32_t (&fragment)[4], int a, int kk) {
            Probabilities<T>(fragment, acc_s[a][2 * kk], acc_s[a][2 * kk + 1], state[a], logits.exponent_scale);
          },
          AddressA<kHeadDim>(smem_v + n % kStages * kStageBytes, 0));
    }
  }

#pragma unroll
  for (int a = 0; a < kAtoms; ++a) {
    const int tile_row = a * Config::kRowsPerAtom + warp_row;
    StoreAtom<T, kHeadDim>(acc_o[a], state[a], logits, p, tile, head, row0 + tile_row, smem_q + tile_row * 2 * kHeadDim);
  }
}

// The item that a CTA takes after `item`. Where the host cannot know how many there will be, the grid is as large as the device
// and CTAs take them one by one.
template <bool kPaged>
__device__ __forceinline__ int64_t NextItem(const WorkList& list, int64_t item) {
  if constexpr (!kPaged) return item + gridDim.x;
  __shared__ int64_t next;
  if (threadIdx.x == 0) next = gridDim.x + static_cast<int64_t>(atomicAdd(list.taken, 1ull));
  __syncthreads();
  return next;
}

template <typename T, typename Config, bool kPaged>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void fwd_sm80_kernel(const __grid_constant__ FwdParams p,
                                                                                      const __grid_constant__ WorkList list) {
  extern __shared__ __align__(512) uint8_t smem[];  // rows of tiles are up to 512 bytes
  __shared__ Tile tile;  // in shared memory, as registers are scarce and the loop over the keys needs little of it
  __shared__ PoolRows<Config::kTileN> pool_rows[kPaged ? 2 : 1];
  // An item is a tile of one head, with the heads of a tile side by side: those of one group read the same keys.
  const int64_t items = *list.count * p.num_heads;
  for (int64_t item = blockIdx.x; item < items; item = NextItem<kPaged>(list, item)) {
    if (threadIdx.x < kWordsPerTile)
      reinterpret_cast<int32_t*>(&tile)[threadIdx.x] =
          reinterpret_cast<const int32_t*>(&list.tiles[item / p.num_heads])[threadIdx.x];
    __syncthreads();
    const int head = static_cast<int>(item % p.num_heads);
    if (Config::kAtoms == 1 || tile.q_owned - tile.row <= Config::kRowsPerAtom) {
      ComputeTile<T, Config, kPaged, 1>(p, tile, head, ptx::SmemAddress(smem), pool_rows);
    } else {
      ComputeTile<T, Config, kPaged, Config::kAtoms>(p, tile, head, ptx::SmemAddress(smem), pool_rows);
    }
    __syncthreads();
  }
}

// The packed call, or what a paged call has beside the sequences that the decode kernel takes.
template <typename T, typename Config, bool kPaged>
cudaError_t LaunchFwdSm80As(const FwdParams& params, const FwdWorkspace& workspace, const Device& device, cudaStream_t stream) {
  constexpr int64_t kMaxGrid = 0x7fffffff;
  const WorkList& list = workspace.list;
  cudaError_t error;
  if constexpr (kPaged) {
    error = LaunchPagedSchedule(params, Config::kTileM, Config::kTileN, list, DecodeStep(params), workspace.most_shares,
                                workspace.decode, stream);
    if (error || IsAllDecode(params)) return error;
  } else {
    error = LaunchSchedule(params, TilesOf::kQueries, Config::kTileM, Config::kTileN, list, stream);
  }
  if (error) return error;
  const auto kernel = fwd_sm80_kernel<T, Config, kPaged>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes);
  if (error) return error;
  const int64_t items = MaxTiles(params.total_q, params.batch, Config::kTileM) * params.num_heads;
  const int64_t most = kPaged ? device.multiprocessors * Config::kMinCtas : kMaxGrid;
  kernel<<<static_cast<int>(items < most ? items : most), Config::kThreads, Config::kSmemBytes, stream>>>(params, list);
  return cudaGetLastError();
}

template <typename T, bool kPaged>
cudaError_t LaunchFwdSm80(const FwdParams& params, const FwdWorkspace& workspace, const Device& device, cudaStream_t stream) {
  const int64_t head_dim = params.head_dim > params.head_dim_v ? params.head_dim : params.head_dim_v;
  if (head_dim <= 64) return LaunchFwdSm80As<T, FwdTile64, kPaged>(params, workspace, device, stream);
  if (head_dim <= 128) return LaunchFwdSm80As<T, FwdTile128, kPaged>(params, workspace, device, stream);
  if (FwdTile256Wide::kSmemBytes + kStaticSmemBytes <= device.smem_bytes)
    return LaunchFwdSm80As<T, FwdTile256Wide, kPaged>(params, workspace, device, stream);
  return LaunchFwdSm80As<T, FwdTile256, kPaged>(params, workspace, device, stream);
}

}  // namespace jax_varlen
