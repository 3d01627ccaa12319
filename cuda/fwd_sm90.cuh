// The forward kernel of the Hopper family: wgmma, bulk tensor copies, warp specialisation. docs/design.md says why it is so.
//
// A CTA takes items, tiles of q of one head, one by one. Of its first warpgroup one warp fetches items and one copies: both run
// ahead of the others, which own 64 rows of q each. These take turns at the tensor cores: a turn is S = Q K^T for one tile of
// keys and O += P V for the tile before it, which may belong to the item before. While its products run, a warpgroup makes
// probabilities.
#pragma once

#include <numeric>

#include "device.h"
#include "fwd_sm90_copy.cuh"
#include "fwd_sm90_rows.cuh"
#include "params.h"
#include "ptx.cuh"
#include "ptx_sm90.cuh"
#include "schedule.h"
#include "sequence.cuh"
#include "softmax.cuh"
#include "tensor_map.h"
#include "tile_config.h"

namespace jax_varlen {

// A value that is the same in all lanes, told to the compiler: descriptors then are computed once a warp, in uniform registers.
__device__ __forceinline__ uint32_t Uniform(uint32_t x) {
  return __shfl_sync(~0u, x, 0);
}

// Descriptors of a tile in shared memory for wgmma, rows of 128 bytes, swizzled as the copy engine does it. 8 rows are 1024
// bytes from the next 8; `leading` is from 64 columns to the next 64, for a tile whose columns are not those that products sum
// over.
struct Descriptors {
  uint32_t first;

  __device__ __forceinline__ Descriptors(uint32_t smem, uint32_t leading)
      : first(Uniform((smem & 0x3ffff) >> 4 | leading >> 4 << 16)) {}

  // Of what is `offset` bytes behind.
  __device__ __forceinline__ uint64_t At(uint32_t offset) const {
    constexpr uint32_t kStride = 1024, kSwizzle128 = 1;
    return static_cast<uint64_t>(kSwizzle128 << 30 | kStride >> 4) << 32 | (first + (offset >> 4));
  }
};

// Rows of V that no row of the tile sees belong to somebody else, and 0 * NaN is NaN: all consumers together make them zeros,
// in shared memory.
template <typename Config>
__device__ __forceinline__ void ClearRows(uint32_t smem_v, int lo, int hi) {
  constexpr uint32_t zeros[4] = {};
  constexpr int kChunks = Config::kRowBytes / 16, kN = Config::kTileN;
  const int row0 = (threadIdx.x - 128) / kChunks, chunk = threadIdx.x % kChunks;
  const auto clear = [&](int row) {
#pragma unroll
    for (int box = 0; box < Config::kBoxes; ++box)
      ptx::StoreShared16(smem_v + (box * kN + row) * Config::kRowBytes + chunk * 16, zeros);
  };
  for (int row = row0; row < lo; row += Config::kConsumers / kChunks) clear(row);
  for (int row = max(hi, 0) + row0; row < kN; row += Config::kConsumers / kChunks) clear(row);
  ptx::FenceProxyAsync();
  ptx::BarrierSync(kAllConsumers, Config::kConsumers);
}

// What a warpgroup keeps of an item with keys.
struct Sm90Work {
  int slot;
  int first;       // tile of keys
  KeyRange plain;  // see Sm90Item
};

// What a warpgroup does for an item: it stands by where none of its rows counts, so that the others have the multiprocessor.
enum class Sm90Role { kNone, kWorks, kStandsBy };

template <typename T, typename Config>
__device__ __forceinline__ void Consume(const FwdParams& p, uint32_t smem, Sm90Barriers<Config>& barriers,
                                        const Sm90Item* slots) {
  constexpr int kHeadDim = Config::kHeadDim, kTileN = Config::kTileN, kStages = Config::kStages;
  const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, first_row = (threadIdx.x - 128) / 32 * 16;
  const uint32_t smem_k = smem + Config::kQStages * Config::kTileQBytes, smem_v = smem_k + kStages * Config::kTileKBytes;
  RingPlace<kSm90Slots> slot;
  RingPlace<Config::kQStages> q_stage;
  RingPlace<kStages> k_stage, v_stage;
  const auto release = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) ptx::Arrive(ptx::SmemAddress(&barrier));
  };
  const auto take_turn = [&] { ptx::BarrierSync(kFirstTurn + group, 256); };
  const auto pass_turn = [&] { ptx::BarrierArrive(kFirstTurn + (group + 1) % Config::kGroups, 256); };

  float acc_s[kTileN / 8][4], acc_o[kHeadDim / 8][4];
  uint32_t probabilities[kTileN / 16][4];
  RowState state;

  // Looks at the next item that sees a key; those that see none are ended here.
  const auto look = [&](Sm90Work& work) {
    for (;; slot.Advance()) {
      WaitFull(barriers.item_full, slot);
      const Sm90Item& item = slots[slot.index];
      if (item.head < 0) return Sm90Role::kNone;
      if (item.tiles.lo < item.tiles.hi) {
        work = {slot.index, item.tiles.lo, item.plain};
        return item.tile.row + 64 * group < item.tile.q_used ? Sm90Role::kWorks : Sm90Role::kStandsBy;
      }
      StoreNothing<T>(p, item.tile, item.head, item.tile.row + first_row);
      release(barriers.item_empty[slot.index]);
    }
  };
  // acc_s = Q K^T for the next tile of keys; under way when it returns.
  const auto begin_logits = [&] {
    const Descriptors tile_q(smem + q_stage.index * Config::kTileQBytes + group * Config::kGroupQBytes, 0);
    const Descriptors tile_k(smem_k + k_stage.index * Config::kTileKBytes, 0);
    ptx::Pin(acc_s);
    ptx::FenceProducts();
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; ++kk) {
      const uint32_t box = kk / 4, columns = kk % 4 * 32;
      ptx::Wgmma<T, kTileN / 8>::Multiply(acc_s, tile_q.At(box * 64 * Config::kRowBytes + columns),
                                          tile_k.At(box * kTileN * Config::kRowBytes + columns), kk > 0);
    }
    ptx::CommitProducts();
  };
  // acc_o = P V, or += where `add`.
  const auto begin_output = [&](bool add) {
    const Descriptors tile_v(smem_v + v_stage.index * Config::kTileKBytes, kTileN * Config::kRowBytes);
    ptx::Pin(acc_o);
    ptx::FenceProducts();
#pragma unroll
    for (int kk = 0; kk < kTileN / 16; ++kk)
      ptx::Wgmma<T, kHeadDim / 8>::MultiplyTransposed(acc_o, probabilities[kk], tile_v.At(kk * 16 * Config::kRowBytes),
                                                      add || kk > 0);
    ptx::CommitProducts();
  };
  // A tile of K has been met; `last` says that q of the item has met all of them.
  const auto end_logits = [&](bool last) {
    release(barriers.k_empty[k_stage.index]);
    k_stage.Advance();
    if (!last) return;
    release(barriers.q_empty[q_stage.index]);
    q_stage.Advance();
  };
  // From logits to probabilities, in place; returns what the output so far is to be multiplied by.
  const auto softmax = [&](const Sm90Work& work, const Logits& logits, int n) {
    if (!logits.plain) {
      const Tile& tile = slots[work.slot].tile;
      ScaleLogits(acc_s, logits, p.softcap);
      AddAlibi(acc_s, logits, tile.row + first_row + lane / 4 + Shift(tile) - n * kTileN);
    }
    if (n < work.plain.lo || n >= work.plain.hi) {
      const Tile& tile = slots[work.slot].tile;
      MaskLogits(acc_s, p, tile, tile.row + first_row + lane / 4, n * kTileN);
    }
    const float2 rescale = UpdateShift(acc_s, state, logits.exponent_scale);
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

  // Takes the rows that nobody of the item sees out of V of tile n, if there are any.
  const auto clear_values = [&](const Sm90Work& work, int n) {
    if (n >= work.plain.lo && n < work.plain.hi) return;
    const KeyRange any = slots[work.slot].any;
    const int lo = any.lo - n * kTileN, hi = any.hi - n * kTileN;
    if (lo <= 0 && hi >= kTileN) return;
    WaitFull(barriers.v_full, v_stage);
    ClearRows<Config>(smem_v + v_stage.index * Config::kTileKBytes, lo, hi);
  };
  const auto end_values = [&] {
    release(barriers.v_empty[v_stage.index]);
    v_stage.Advance();
  };
  const auto end_output = [&] {
    ptx::WaitProducts<0>();
    ptx::Pin(acc_o);
    end_values();
  };
  const auto store = [&](const Sm90Work& work, const RowState& state) {
    const Sm90Item& item = slots[work.slot];
    StoreRows16<T, kHeadDim>(acc_o, state, p, item.tile, item.head, item.tile.row + first_row);
    release(barriers.item_empty[work.slot]);
  };

  if (group == Config::kGroups - 1) pass_turn();
  for (;;) {
    // Here the warpgroup has nothing under way.
    Sm90Work work;
    const Sm90Role role = look(work);
    if (role == Sm90Role::kNone) return;
    slot.Advance();
    int n = slots[work.slot].tiles.hi - 1;
    bool adds = false;  // whether acc_o has something of the item
    WaitFull(barriers.q_full, q_stage);
    if (role == Sm90Role::kStandsBy) {
      for (; n >= work.first; --n) {
        WaitFull(barriers.k_full, k_stage);
        take_turn();
        pass_turn();
        end_logits(n == work.first);
        clear_values(work, n);
        WaitFull(barriers.v_full, v_stage);
        end_values();
      }
      const Sm90Item& item = slots[work.slot];
      StoreNothing<T>(p, item.tile, item.head, item.tile.row + first_row);
      release(barriers.item_empty[work.slot]);
      continue;
    }
    Logits logits(p, slots[work.slot].tile, slots[work.slot].head);
    state = RowState();
    WaitFull(barriers.k_full, k_stage);
    take_turn();
    begin_logits();
    pass_turn();
    ptx::WaitProducts<0>();
    ptx::Pin(acc_s);
    end_logits(n == work.first);
    softmax(work, logits, n);
    round();
    for (;;) {
      // Here are the probabilities of tile n of the item; its output so far is in acc_o, if there is any.
      const bool ends = n == work.first;
      clear_values(work, n);
      Sm90Work next = work;
      int next_n = n - 1;
      if (ends) {
        if (look(next) != Sm90Role::kWorks) break;
        slot.Advance();
        next_n = slots[next.slot].tiles.hi - 1;
        WaitFull(barriers.q_full, q_stage);
      }
      WaitFull(barriers.k_full, k_stage);
      take_turn();
      begin_logits();
      WaitFull(barriers.v_full, v_stage);
      begin_output(adds);
      pass_turn();
      ptx::WaitProducts<1>();
      ptx::Pin(acc_s);
      end_logits(next_n == next.first);
      const RowState ended = state;
      if (ends) {
        state = RowState();
        logits = Logits(p, slots[next.slot].tile, slots[next.slot].head);
      }
      const float2 rescale = softmax(next, logits, next_n);
      // The sums take part in the vote, though they are never negative: else the compiler moves what they are made of, the
      // whole softmax, behind the wait for the product that it is to overlap.
      const bool rescales = rescale.x != 1.f || rescale.y != 1.f || state.row_sum[0] + state.row_sum[1] < 0.f;
      if (__any_sync(~0u, rescales)) {
        end_output();
        if (!ends) {
#pragma unroll
          for (int d = 0; d < kHeadDim / 8; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc_o[d][e] *= e < 2 ? rescale.x : rescale.y;
        }
      } else {
        end_output();
      }
      if (ends) store(work, ended);
      round();
      work = next;
      n = next_n;
      adds = !ends;
    }
    WaitFull(barriers.v_full, v_stage);
    begin_output(adds);
    end_output();
    store(work, state);
  }
}

template <typename T, typename Config, bool kPaged>
__global__ __launch_bounds__(Config::kThreads, 1) void fwd_sm90_kernel(const __grid_constant__ FwdParams p,
                                                                       const __grid_constant__ WorkList list,
                                                                       const __grid_constant__ Sm90Maps maps) {
  extern __shared__ uint8_t dynamic_smem[];
  __shared__ Sm90Barriers<Config> barriers;
  __shared__ Sm90Item slots[kSm90Slots];
  constexpr int kConsumerWarps = Config::kConsumers / 32;
  const uint32_t smem = (ptx::SmemAddress(dynamic_smem) + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  if (threadIdx.x == 0) {
    const auto init = [](auto& ring, int arrivals) {
      for (uint64_t& barrier : ring) ptx::InitBarrier(ptx::SmemAddress(&barrier), arrivals);
    };
    init(barriers.item_full, 1);
    init(barriers.item_empty, kConsumerWarps + 1);
    init(barriers.q_full, 1);
    init(barriers.q_empty, kConsumerWarps);
    init(barriers.k_full, 1);
    init(barriers.k_empty, kConsumerWarps);
    init(barriers.v_full, 1);
    init(barriers.v_empty, kConsumerWarps);
    ptx::FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::LowerRegisters<Config::kProducerRegisters>();
    if (threadIdx.x < 32) Copy<Config, kPaged>(p, maps, smem, barriers, slots);
    if (threadIdx.x == 32) FetchItems<Config>(p, list, barriers.item_full, barriers.item_empty, slots);
  } else {
    ptx::RaiseRegisters<Config::kConsumerRegisters>();
    Consume<T, Config>(p, smem, barriers, slots);
  }
}

template <typename T, typename Config, bool kPaged>
cudaError_t LaunchFwdSm90As(const FwdParams& params, const FwdWorkspace& workspace, const Device& device, cudaStream_t stream) {
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
  Sm90Maps maps;
  maps.rows_k = kPaged ? std::gcd(static_cast<int>(params.block_size), Config::kTileN) : Config::kTileN;
  error = EncodeMap(&maps.q, params.q, params.dtype, params.total_q, params.num_heads, params.head_dim, 64);
  if (!error)
    error = EncodeMap(&maps.k, params.k, params.dtype, params.total_k, params.num_kv_heads, params.head_dim, maps.rows_k);
  if (!error)
    error = EncodeMap(&maps.v, params.v, params.dtype, params.total_k, params.num_kv_heads, params.head_dim_v, maps.rows_k);
  if (error) return error;
  const auto kernel = fwd_sm90_kernel<T, Config, kPaged>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes);
  if (error) return error;
  kernel<<<device.multiprocessors, Config::kThreads, Config::kSmemBytes, stream>>>(params, list, maps);
  return cudaGetLastError();
}

template <typename T, bool kPaged>
cudaError_t LaunchFwdSm90(const FwdParams& params, const FwdWorkspace& workspace, const Device& device, cudaStream_t stream) {
  const int64_t head_dim = params.head_dim > params.head_dim_v ? params.head_dim : params.head_dim_v;
  if (head_dim <= 64) {
    if (params.window_right != kUnbounded)
      return LaunchFwdSm90As<T, Sm90Tile64Causal, kPaged>(params, workspace, device, stream);
    return LaunchFwdSm90As<T, Sm90Tile64, kPaged>(params, workspace, device, stream);
  }
  if (head_dim <= 96) return LaunchFwdSm90As<T, Sm90Tile96, kPaged>(params, workspace, device, stream);
  if (head_dim <= 128) return LaunchFwdSm90As<T, Sm90Tile128, kPaged>(params, workspace, device, stream);
  if (head_dim <= 192) return LaunchFwdSm90As<T, Sm90Tile192, kPaged>(params, workspace, device, stream);
  return LaunchFwdSm90As<T, Sm90Tile256, kPaged>(params, workspace, device, stream);
}

}  // namespace jax_varlen
