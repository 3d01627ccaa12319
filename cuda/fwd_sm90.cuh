// The forward kernel of the Hopper family: wgmma, bulk tensor copies, warp specialisation. Not chosen yet: see docs/tuning.md.
//
// A CTA takes tiles of 128 rows of q of one head, one by one. One warp of the first warpgroup copies: it runs ahead of the two
// others by kStages tiles of keys and by a tile of q. Each of these owns 64 rows; while its products O += P V of one tile of
// keys run, it makes the probabilities of the next.
#pragma once

#include "device.h"
#include "fwd_store.cuh"
#include "params.h"
#include "ptx_sm90.cuh"
#include "schedule.h"
#include "sequence.cuh"
#include "softmax.cuh"

namespace jax_varlen {

template <int HeadDim, int TileN, int Stages>
struct Sm90TileConfig {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kTileN = TileN;
  static constexpr int kStages = Stages;
  static constexpr int kTileM = 128;
  static constexpr int kThreads = 384;
  static constexpr int kBoxColumns = 64;  // 128 bytes, what the copy engine swizzles
  static constexpr int kBoxes = HeadDim / kBoxColumns;
  static constexpr uint32_t kRowBytes = 2 * kBoxColumns;
  static constexpr uint32_t kGroupQBytes = 64 * 2 * HeadDim;    // of one warpgroup: (boxes, 64 rows, 128 bytes)
  static constexpr uint32_t kTileKBytes = TileN * 2 * HeadDim;  // (boxes, TileN rows, 128 bytes)
  static constexpr int kSmemBytes = 2 * kGroupQBytes + 2 * Stages * kTileKBytes;
};

using Sm90Tile64 = Sm90TileConfig<64, 128, 4>;
using Sm90Tile128 = Sm90TileConfig<128, 128, 2>;

struct Sm90Maps {
  CUtensorMap q, k, v;
};

constexpr int kSm90Slots = 2;  // work items that are known at a time
constexpr int kConsumerWarps = 8;

struct Sm90Item {
  Tile tile;
  int head;  // none where negative
};

template <int kStages>
struct Sm90Barriers {
  uint64_t item_full[kSm90Slots], item_empty[kSm90Slots];
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

// A place in a ring of kSize, and the parity of its round.
template <int kSize>
struct RingPlace {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
};

// Descriptor of a tile in shared memory for wgmma, rows of 128 bytes, swizzled as the copy engine does it. `stride` is from 8
// rows to the next 8, `leading` from 64 columns to the next 64 where they are the free dimension.
__device__ __forceinline__ uint64_t Descriptor(uint32_t smem, uint32_t leading) {
  constexpr uint64_t kStride = 1024, kSwizzle128 = 1;
  return (smem & 0x3ffff) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 | kStride >> 4 << 32 | kSwizzle128 << 62;
}

template <typename Config>
__device__ __forceinline__ KeyRange TilesOfKeys(const KeyRange& any) {
  return any.lo < any.hi ? KeyRange{any.lo / Config::kTileN, (any.hi - 1) / Config::kTileN + 1} : KeyRange{0, 0};
}

template <typename Config>
__device__ __forceinline__ void Produce(const FwdParams& p, const WorkList& list, const Sm90Maps& maps, uint32_t smem,
                                        Sm90Barriers<Config::kStages>& barriers, Sm90Item* slots) {
  constexpr int kTileN = Config::kTileN, kStages = Config::kStages;
  const uint32_t smem_k = smem + 2 * Config::kGroupQBytes, smem_v = smem_k + kStages * Config::kTileKBytes;
  const int64_t items = *list.count * p.num_heads;
  RingPlace<kSm90Slots> slot;
  RingPlace<kStages> stage;
  uint32_t q_parity = 0;
  for (int64_t item = blockIdx.x;;) {
    ptx::WaitBarrier(ptx::SmemAddress(&barriers.item_empty[slot.index]), slot.parity ^ 1);
    Sm90Item& next = slots[slot.index];
    const bool there = item < items;
    next.head = there ? static_cast<int>(item % p.num_heads) : -1;
    if (there) next.tile = list.tiles[item / p.num_heads];
    ptx::Arrive(ptx::SmemAddress(&barriers.item_full[slot.index]));
    if (!there) return;
    const Tile tile = next.tile;
    const int head = next.head, kv_head = head / p.group_size;
    slot.Advance();
    const KeyRange tiles = TilesOfKeys<Config>(VisibleToAny(p, tile, Config::kTileM));
    if (tiles.lo < tiles.hi) {
      const uint32_t q_full = ptx::SmemAddress(&barriers.q_full);
      ptx::WaitBarrier(ptx::SmemAddress(&barriers.q_empty), q_parity ^ 1);
      q_parity ^= 1;
      ptx::ArriveExpect(q_full, 2 * Config::kGroupQBytes);
      for (int group = 0; group < 2; ++group)
        for (int box = 0; box < Config::kBoxes; ++box)
          ptx::CopyBox3(smem + group * Config::kGroupQBytes + box * 64 * Config::kRowBytes, &maps.q, q_full,
                        box * Config::kBoxColumns, head, tile.q_begin + tile.row + 64 * group);
      for (int n = tiles.hi - 1; n >= tiles.lo; --n) {
        auto copy = [&](const CUtensorMap* map, uint64_t* full, uint64_t* empty, uint32_t to) {
          ptx::WaitBarrier(ptx::SmemAddress(&empty[stage.index]), stage.parity ^ 1);
          ptx::ArriveExpect(ptx::SmemAddress(&full[stage.index]), Config::kTileKBytes);
          for (int box = 0; box < Config::kBoxes; ++box)
            ptx::CopyBox3(to + stage.index * Config::kTileKBytes + box * kTileN * Config::kRowBytes, map,
                          ptx::SmemAddress(&full[stage.index]), box * Config::kBoxColumns, kv_head, tile.k_begin + n * kTileN);
        };
        copy(&maps.k, barriers.k_full, barriers.k_empty, smem_k);
        copy(&maps.v, barriers.v_full, barriers.v_empty, smem_v);
        stage.Advance();
      }
    }
    item = gridDim.x + static_cast<int64_t>(atomicAdd(list.taken, 1ull));
  }
}

// In place: the probabilities of a tile, not normalised and not rounded, and their sums.
template <int kN>
__device__ __forceinline__ void Exponentials(float (&acc_s)[kN][4], SoftmaxState& state, float exponent_scale) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      acc_s[n][e] = ptx::Exp2(fmaf(acc_s[n][e], exponent_scale, -state.shift[e / 2]));
      state.row_sum[e / 2] += acc_s[n][e];
    }
}

// Rows of V that no row of the tile sees belong to somebody else, and 0 * NaN is NaN: they become zeros, in shared memory.
template <typename Config>
__device__ __forceinline__ void ClearRows(uint32_t smem_v, int lo, int hi) {
  constexpr uint32_t zeros[4] = {};
  constexpr int kChunks = Config::kRowBytes / 16;
  const int thread = threadIdx.x - 128;
  for (int i = thread; i < Config::kTileN * kChunks * Config::kBoxes; i += 32 * kConsumerWarps) {
    const int row = i / kChunks % Config::kTileN;
    if (row < lo || row >= hi) ptx::StoreShared16(smem_v + 16 * i, zeros);
  }
  ptx::FenceProxyAsync();
  ptx::BarrierSync(1, 32 * kConsumerWarps);
}

template <typename T, typename Config>
__device__ __forceinline__ void Consume(const FwdParams& p, uint32_t smem, Sm90Barriers<Config::kStages>& barriers,
                                        const Sm90Item* slots) {
  constexpr int kHeadDim = Config::kHeadDim, kTileN = Config::kTileN, kStages = Config::kStages;
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const uint32_t smem_q = smem + group * Config::kGroupQBytes, smem_k = smem + 2 * Config::kGroupQBytes;
  const uint32_t smem_v = smem_k + kStages * Config::kTileKBytes;
  RingPlace<kSm90Slots> slot;
  RingPlace<kStages> k_stage, v_stage;
  uint32_t q_parity = 0;
  const auto release = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) ptx::Arrive(ptx::SmemAddress(&barrier));
  };

  for (;; slot.Advance()) {
    ptx::WaitBarrier(ptx::SmemAddress(&barriers.item_full[slot.index]), slot.parity);
    const Tile tile = slots[slot.index].tile;
    const int head = slots[slot.index].head;
    release(barriers.item_empty[slot.index]);
    if (head < 0) return;
    const KeyRange any = VisibleToAny(p, tile, Config::kTileM), all = VisibleToAll(p, tile, Config::kTileM);
    const KeyRange tiles = TilesOfKeys<Config>(any);
    const bool sees = tiles.lo < tiles.hi;
    const int group_row = tile.row + 64 * group, thread_row = group_row + 16 * warp + lane / 4;
    const Logits logits(p, tile, head);
    float acc_o[kHeadDim / 8][4] = {};
    SoftmaxState state;
    uint32_t probabilities[kTileN / 16][4];

    // acc_s = Q K^T for the next tile of keys; under way when it returns.
    float acc_s[kTileN / 8][4];
    const auto begin_logits = [&] {
      ptx::WaitBarrier(ptx::SmemAddress(&barriers.k_full[k_stage.index]), k_stage.parity);
      const uint32_t tile_k = smem_k + k_stage.index * Config::kTileKBytes;
      ptx::Pin(acc_s);
      ptx::FenceProducts();
#pragma unroll
      for (int kk = 0; kk < kHeadDim / 16; ++kk) {
        const uint32_t box = kk / 4, columns = kk % 4 * 32;
        ptx::Wgmma<T, kTileN / 8>::Multiply(acc_s, Descriptor(smem_q + box * 64 * Config::kRowBytes + columns, 0),
                                            Descriptor(tile_k + box * kTileN * Config::kRowBytes + columns, 0), kk > 0);
      }
      ptx::CommitProducts();
    };
    const auto begin_output = [&](int n) {
      ptx::WaitBarrier(ptx::SmemAddress(&barriers.v_full[v_stage.index]), v_stage.parity);
      const uint32_t tile_v = smem_v + v_stage.index * Config::kTileKBytes;
      const int lo = any.lo - n * kTileN, hi = any.hi - n * kTileN;
      if (lo > 0 || hi < kTileN) ClearRows<Config>(tile_v, lo, hi);
      ptx::Pin(acc_o);
      ptx::FenceProducts();
#pragma unroll
      for (int kk = 0; kk < kTileN / 16; ++kk)
        ptx::Wgmma<T, kHeadDim / 8>::MultiplyTransposed(
            acc_o, probabilities[kk], Descriptor(tile_v + kk * 16 * Config::kRowBytes, kTileN * Config::kRowBytes));
      ptx::CommitProducts();
    };
    // From logits to probabilities, in place; returns what the output so far is to be multiplied by.
    const auto softmax = [&](int n) {
      const int key0 = n * kTileN;
      if (!logits.plain) {
        ScaleLogits(acc_s, logits, p.softcap);
        AddAlibi(acc_s, logits, thread_row + Shift(tile) - key0);
      }
      if (key0 < all.lo || key0 + kTileN > all.hi) MaskLogits(acc_s, p, tile, thread_row, key0);
      const float2 rescale = UpdateMax(acc_s, state, logits.exponent_scale);
      Exponentials(acc_s, state, logits.exponent_scale);
      return rescale;
    };
    const auto round = [&] {
#pragma unroll
      for (int kk = 0; kk < kTileN / 16; ++kk)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          probabilities[kk][e] = ptx::Pack2<T>(acc_s[2 * kk + e / 2][2 * (e % 2)], acc_s[2 * kk + e / 2][2 * (e % 2) + 1]);
    };

    if (sees) {
      ptx::WaitBarrier(ptx::SmemAddress(&barriers.q_full), q_parity);
      q_parity ^= 1;
      begin_logits();
      ptx::WaitProducts<0>();
      ptx::Pin(acc_s);
      release(barriers.k_empty[k_stage.index]);
      k_stage.Advance();
      softmax(tiles.hi - 1);
      round();
      for (int n = tiles.hi - 2; n >= tiles.lo; --n) {
        begin_logits();
        begin_output(n + 1);
        ptx::WaitProducts<1>();
        ptx::Pin(acc_s);
        release(barriers.k_empty[k_stage.index]);
        k_stage.Advance();
        const float2 rescale = softmax(n);
        ptx::WaitProducts<0>();
        ptx::Pin(acc_o);
        release(barriers.v_empty[v_stage.index]);
        v_stage.Advance();
#pragma unroll
        for (int d = 0; d < kHeadDim / 8; ++d)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc_o[d][e] *= e < 2 ? rescale.x : rescale.y;
        round();
      }
      begin_output(tiles.lo);
      ptx::WaitProducts<0>();
      ptx::Pin(acc_o);
      release(barriers.v_empty[v_stage.index]);
      v_stage.Advance();
      ptx::BarrierSync(2 + group, 128);  // the warpgroup's rows of q are no longer read, and out passes through them
    }
    StoreAtom<T, kHeadDim>(acc_o, state, logits, p, tile, head, group_row + 16 * warp, smem_q + 16 * warp * 2 * kHeadDim);
    if (sees) {
      ptx::FenceProxyAsync();
      release(barriers.q_empty);
    }
  }
}

template <typename T, typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void fwd_sm90_kernel(const __grid_constant__ FwdParams p,
                                                                       const __grid_constant__ WorkList list,
                                                                       const __grid_constant__ Sm90Maps maps) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ Sm90Barriers<Config::kStages> barriers;
  __shared__ Sm90Item slots[kSm90Slots];
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) { ptx::InitBarrier(ptx::SmemAddress(&barrier), arrivals); };
    for (int i = 0; i < kSm90Slots; ++i) {
      init(barriers.item_full[i], 1);
      init(barriers.item_empty[i], kConsumerWarps);
    }
    init(barriers.q_full, 1);
    init(barriers.q_empty, kConsumerWarps);
    for (int i = 0; i < Config::kStages; ++i) {
      init(barriers.k_full[i], 1);
      init(barriers.v_full[i], 1);
      init(barriers.k_empty[i], kConsumerWarps);
      init(barriers.v_empty[i], kConsumerWarps);
    }
    ptx::FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::LowerRegisters<24>();
    if (threadIdx.x == 0) Produce<Config>(p, list, maps, ptx::SmemAddress(smem), barriers, slots);
  } else {
    ptx::RaiseRegisters<240>();
    Consume<T, Config>(p, ptx::SmemAddress(smem), barriers, slots);
  }
}

// A map of rows of heads (rows, heads, columns) for boxes of 64 columns of one head.
inline cudaError_t EncodeMap(CUtensorMap* map, const void* data, DType dtype, int64_t rows, int64_t heads, int64_t columns,
                             int box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(2 * columns), static_cast<cuuint64_t>(2 * columns * heads)};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(box_rows)}, steps[3] = {1, 1, 1};
  const auto type = dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode(map, type, 3, const_cast<void*>(data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T, typename Config>
cudaError_t LaunchFwdSm90As(const FwdParams& params, const WorkList& list, const Device& device, cudaStream_t stream) {
  cudaError_t error = LaunchSchedule(params, TilesOf::kQueries, Config::kTileM, Config::kTileN, list, stream);
  if (error) return error;
  Sm90Maps maps;
  error = EncodeMap(&maps.q, params.q, params.dtype, params.total_q, params.num_heads, params.head_dim, 64);
  if (!error)
    error = EncodeMap(&maps.k, params.k, params.dtype, params.total_k, params.num_kv_heads, params.head_dim, Config::kTileN);
  if (!error)
    error = EncodeMap(&maps.v, params.v, params.dtype, params.total_k, params.num_kv_heads, params.head_dim_v, Config::kTileN);
  if (error) return error;
  const auto kernel = fwd_sm90_kernel<T, Config>;
  constexpr int kSmemBytes = Config::kSmemBytes + 1024;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error) return error;
  kernel<<<device.multiprocessors, Config::kThreads, kSmemBytes, stream>>>(params, list, maps);
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchFwdSm90(const FwdParams& params, const WorkList& list, const Device& device, cudaStream_t stream) {
  const int64_t head_dim = params.head_dim > params.head_dim_v ? params.head_dim : params.head_dim_v;
  return head_dim <= 64 ? LaunchFwdSm90As<T, Sm90Tile64>(params, list, device, stream)
                        : LaunchFwdSm90As<T, Sm90Tile128>(params, list, device, stream);
}

}  // namespace jax_varlen
