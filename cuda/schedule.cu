// One CTA counts the tiles by cost and then writes them in descending order of cost: a counting sort.
//
// The hardware starts CTAs in the order of the list, so the longest tiles start first and short ones fill the gaps (LPT).
// Ties fall in any order; a tile's result does not depend on it.
#include "schedule.h"
#include "sequence.cuh"

namespace jax_varlen {
namespace {

static_assert(sizeof(Tile) == kWordsPerTile * sizeof(int32_t));

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBuckets = 512;
constexpr int kExactCosts = 64;  // costs below have buckets of their own, above there are 16 buckets an octave

// Rows that belong to nobody are two more sequences without keys: those before the first one and those after the last.
constexpr int kSequencesOfNobody = 2;

// Bucket 0 holds the longest tiles.
__device__ __forceinline__ int BucketOf(int cost) {
  if (cost < kExactCosts) return kBuckets - 1 - cost;
  const int octave = 31 - __clz(cost);
  const int bucket = kExactCosts + (octave - 6) * 16 + ((cost >> (octave - 4)) & 15);
  return kBuckets - 1 - min(bucket, kBuckets - 1);
}

struct Rows {
  int begin, owned, used;
};

// Wrong offsets are clamped: they give wrong rows, never rows outside the array.
__device__ __forceinline__ Rows LoadRows(const int32_t* cu_seqlens, const int32_t* seqused, int b, int64_t total) {
  const int begin = Clamp(cu_seqlens[b], 0, total), owned = Clamp(cu_seqlens[b + 1], begin, total) - begin;
  return {begin, owned, seqused ? Clamp(seqused[b], 0, owned) : owned};
}

// The first tile of sequence b.
__device__ __forceinline__ Tile FirstTile(const FwdParams& p, int b) {
  if (b >= p.batch) {
    const int first = Clamp(p.cu_seqlens_q[0], 0, p.total_q), last = Clamp(p.cu_seqlens_q[p.batch], 0, p.total_q);
    return b == p.batch ? Tile{b, 0, 0, first, 0, 0, 0, 0} : Tile{b, 0, last, static_cast<int>(p.total_q) - last, 0, 0, 0, 0};
  }
  const Rows q = LoadRows(p.cu_seqlens_q, p.seqused_q, b, p.total_q);
  const Rows k = LoadRows(p.cu_seqlens_k, p.seqused_k, b, p.total_k);
  return {b, 0, q.begin, q.owned, q.used, k.begin, k.used, 0};
}

__device__ __forceinline__ int CostOf(const FwdParams& p, const Tile& tile, int tile_m, int tile_n) {
  const KeyRange keys = VisibleToAny(p, tile, tile_m);
  return keys.lo < keys.hi ? (keys.hi + tile_n - 1) / tile_n - keys.lo / tile_n : 0;
}

__device__ __forceinline__ int InclusiveSumOverLanes(int x) {
  const int lane = threadIdx.x % 32;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, x, d);
    if (lane >= d) x += other;
  }
  return x;
}

// Calls visit(tile, bucket) once for every tile. A warp takes 32 sequences at a time and spreads their tiles over its lanes, so
// that one long sequence and many short ones both keep the lanes busy.
template <typename Visit>
__device__ void ForEachTile(const FwdParams& p, int tile_m, int tile_n, Visit visit) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t sequences = p.batch + kSequencesOfNobody;
  for (int64_t first = warp * 32; first < sequences; first += kWarps * 32) {
    const Tile mine = first + lane < sequences ? FirstTile(p, static_cast<int>(first + lane)) : Tile{};
    const int tiles = mine.q_owned / tile_m + (mine.q_owned % tile_m > 0);
    const int end = InclusiveSumOverLanes(tiles), total = __shfl_sync(~0u, end, 31);
    for (int base = 0; base < total; base += 32) {
      const int i = base + lane;
      int owner = 0;  // the first lane whose tiles end beyond i
      for (int step = 16; step > 0; step /= 2)
        if (__shfl_sync(~0u, end, owner + step - 1) <= i) owner += step;
      const int begin = __shfl_sync(~0u, end - tiles, owner);
      Tile tile;
      tile.sequence = static_cast<int>(first) + owner;
      tile.row = (i - begin) * tile_m;
      tile.q_begin = __shfl_sync(~0u, mine.q_begin, owner);
      tile.q_owned = __shfl_sync(~0u, mine.q_owned, owner);
      tile.q_used = __shfl_sync(~0u, mine.q_used, owner);
      tile.k_begin = __shfl_sync(~0u, mine.k_begin, owner);
      tile.k_used = __shfl_sync(~0u, mine.k_used, owner);
      tile.pad = 0;
      if (i < total) visit(tile, BucketOf(CostOf(p, tile, tile_m, tile_n)));
    }
  }
}

__global__ __launch_bounds__(kThreads) void schedule_kernel(const __grid_constant__ FwdParams p, int tile_m, int tile_n,
                                                            const __grid_constant__ WorkList list) {
  __shared__ int next[kBuckets];  // first the number of tiles in the bucket, then where its next tile goes
  for (int i = threadIdx.x; i < kBuckets; i += kThreads) next[i] = 0;
  __syncthreads();
  ForEachTile(p, tile_m, tile_n, [&](const Tile&, int bucket) { atomicAdd(&next[bucket], 1); });
  __syncthreads();

  if (threadIdx.x < 32) {
    constexpr int kPerLane = kBuckets / 32;
    int counts[kPerLane], mine = 0;
    for (int i = 0; i < kPerLane; ++i) mine += counts[i] = next[threadIdx.x * kPerLane + i];
    const int end = InclusiveSumOverLanes(mine);
    int before = end - mine;
    for (int i = 0; i < kPerLane; ++i) {
      next[threadIdx.x * kPerLane + i] = before;
      before += counts[i];
    }
    // Offsets that decrease can claim more tiles than there are rows for; those beyond the list are dropped.
    if (threadIdx.x == 31) *list.count = Clamp(end, 0, list.capacity);
  }
  __syncthreads();

  ForEachTile(p, tile_m, tile_n, [&](const Tile& tile, int bucket) {
    const int slot = atomicAdd(&next[bucket], 1);
    if (0 <= slot && slot < list.capacity) list.tiles[slot] = tile;
  });
}

}  // namespace

cudaError_t LaunchSchedule(const FwdParams& params, int tile_m, int tile_n, const WorkList& list, cudaStream_t stream) {
  schedule_kernel<<<1, kThreads, 0, stream>>>(params, tile_m, tile_n, list);
  return cudaGetLastError();
}

}  // namespace jax_varlen
