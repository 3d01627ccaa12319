// One CTA counts the tiles by cost and then writes them in descending order of cost: a counting sort.
//
// The hardware starts CTAs in the order of the list, so the longest tiles start first and short ones fill the gaps (LPT).
// Tiles of one sequence that cost the same are listed in the order of their rows; other ties fall in any order. Later keys
// never cost more than earlier ones, so that tiles of keys of one sequence start in their order: the backward kernel waits for
// those before it.
#include "schedule.h"
#include "sequence.cuh"

namespace jax_varlen {
namespace {

static_assert(sizeof(Tile) == kWordsPerTile * sizeof(int32_t));
static_assert(sizeof(DecodeTile) == kWordsPerDecodeTile * sizeof(int32_t));
static_assert(sizeof(DecodeHead) <= kWordsPerDecodeTile * sizeof(int32_t));

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

// A paged sequence has its keys in blocks of its own, from 0 on; no more of them than its row of the table has room for.
__device__ __forceinline__ Rows LoadKeys(const FwdParams& p, int b) {
  if (p.block_size == 0) return LoadRows(p.cu_seqlens_k, p.seqused_k, b, p.total_k);
  const int64_t capacity = min(p.max_blocks * p.block_size, int64_t{INT_MAX});
  const int64_t length = p.cu_seqlens_k ? static_cast<int64_t>(p.cu_seqlens_k[b + 1]) - p.cu_seqlens_k[b] : capacity;
  const int owned = Clamp(length, 0, capacity);
  return {0, owned, p.seqused_k ? Clamp(p.seqused_k[b], 0, owned) : owned};
}

// What is listed: see LaunchSchedule.
struct Request {
  TilesOf side;
  int rows, other_rows;
};

// Sequences after offsets that fall could share rows: then there is none, and every row is nobody's.
__device__ __forceinline__ int64_t SequencesOf(const FwdParams& p) {
  bool falls = false;
#pragma unroll 8
  for (int64_t b = threadIdx.x; b < p.batch; b += kThreads)
    falls |= p.cu_seqlens_q[b] > p.cu_seqlens_q[b + 1] || (p.cu_seqlens_k && p.cu_seqlens_k[b] > p.cu_seqlens_k[b + 1]);
  return __syncthreads_or(falls) ? 0 : p.batch;
}

__device__ __forceinline__ Tile SequenceTile(const FwdParams& p, int b) {
  const Rows q = LoadRows(p.cu_seqlens_q, p.seqused_q, b, p.total_q);
  const Rows k = LoadKeys(p, b);
  return {b, 0, q.begin, q.owned, q.used, k.begin, k.owned, k.used};
}

// Whether the decode kernel takes a sequence: paged, with rows that fit into one of its tiles (or one query, whatever its
// heads), of which one sees a key.
__device__ __forceinline__ bool IsDecode(const FwdParams& p, const Tile& sequence) {
  if (p.block_size == 0 || sequence.q_used == 0) return false;
  if (sequence.q_used > 1 && int64_t{sequence.q_used} * p.group_size > kDecodeRows) return false;
  const KeyRange seen = VisibleToAny(p, sequence, sequence.q_used);
  return seen.lo < seen.hi;
}

// The first tile of sequence b of `batch`.
__device__ __forceinline__ Tile FirstTile(const FwdParams& p, int64_t batch, TilesOf side, int b) {
  if (b < batch) {
    Tile tile = SequenceTile(p, b);
    if (side == TilesOf::kQueries && IsDecode(p, tile)) {  // what remains are the rows that do not count
      tile.q_begin += tile.q_used;
      tile.q_owned -= tile.q_used;
      tile.q_used = 0;
    }
    return tile;
  }
  const bool queries = side == TilesOf::kQueries;
  const int32_t* cu_seqlens = queries ? p.cu_seqlens_q : p.cu_seqlens_k;
  const int total = static_cast<int>(queries ? p.total_q : p.total_k);
  const int first = Clamp(cu_seqlens[0], 0, total), last = Clamp(cu_seqlens[batch], 0, total);
  const int begin = b == batch ? 0 : last, owned = b == batch ? first : total - last;
  return queries ? Tile{b, 0, begin, owned, 0, 0, 0, 0} : Tile{b, 0, 0, 0, 0, begin, owned, 0};
}

// The number of tiles of the other side that a tile meets, for keys as if a window had no left bound: those that the bound
// shortens meet about equally many, and without it later keys of a sequence never cost more than earlier ones.
__device__ __forceinline__ int CostOf(const FwdParams& p, const Request& request, const Tile& tile) {
  KeyRange met = {0, 0};
  if (request.side == TilesOf::kQueries)
    met = VisibleToAny(p, tile, request.rows);
  else if (tile.row < tile.k_used)
    met = {FirstQuery(p, tile, tile.row), tile.q_used};
  const int n = request.other_rows;
  return met.lo < met.hi ? (met.hi + n - 1) / n - met.lo / n : 0;
}

__device__ __forceinline__ int InclusiveSumOverLanes(int x) {
  const int lane = threadIdx.x % 32;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, x, d);
    if (lane >= d) x += other;
  }
  return x;
}

// The next of a bucket's places for the tile of every lane, in the order of the lanes; lanes without one give the bucket -1.
__device__ __forceinline__ int NextPlace(int* next, int bucket) {
  const int lane = threadIdx.x % 32;
  const unsigned same = __match_any_sync(~0u, bucket);
  const int first_lane = __ffs(same) - 1;
  int place = 0;
  if (lane == first_lane && bucket >= 0) place = atomicAdd(&next[bucket], __popc(same));
  return __shfl_sync(~0u, place, first_lane) + __popc(same & ((1u << lane) - 1));
}

// Calls visit(tile, there) for every tile, `there`, in all lanes at once. A warp takes 32 sequences at a time and spreads their
// tiles over its lanes, in their order, so that one long sequence and many short ones both keep the lanes busy.
template <typename Visit>
__device__ void ForEachTile(const FwdParams& p, int64_t batch, const Request& request, Visit visit) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t sequences = batch + kSequencesOfNobody;
  for (int64_t first = warp * 32; first < sequences; first += kWarps * 32) {
    const Tile mine = first + lane < sequences ? FirstTile(p, batch, request.side, static_cast<int>(first + lane)) : Tile{};
    const int owned = request.side == TilesOf::kQueries ? mine.q_owned : mine.k_owned;
    const int tiles = owned / request.rows + (owned % request.rows > 0);
    const int end = InclusiveSumOverLanes(tiles), total = __shfl_sync(~0u, end, 31);
    for (int base = 0; base < total; base += 32) {
      const int i = base + lane;
      int owner = 0;  // the first lane whose tiles end beyond i
      for (int step = 16; step > 0; step /= 2)
        if (__shfl_sync(~0u, end, owner + step - 1) <= i) owner += step;
      const int begin = __shfl_sync(~0u, end - tiles, owner);
      Tile tile;
      tile.sequence = static_cast<int>(first) + owner;
      tile.row = (i - begin) * request.rows;
      tile.q_begin = __shfl_sync(~0u, mine.q_begin, owner);
      tile.q_owned = __shfl_sync(~0u, mine.q_owned, owner);
      tile.q_used = __shfl_sync(~0u, mine.q_used, owner);
      tile.k_begin = __shfl_sync(~0u, mine.k_begin, owner);
      tile.k_owned = __shfl_sync(~0u, mine.k_owned, owner);
      tile.k_used = __shfl_sync(~0u, mine.k_used, owner);
      visit(tile, i < total);
    }
  }
}

__device__ void ListLongestFirst(const FwdParams& p, const Request& request, const WorkList& list) {
  __shared__ int next[kBuckets];  // first the number of tiles in the bucket, then where its next tile goes
  for (int i = threadIdx.x; i < kBuckets; i += kThreads) next[i] = 0;
  const int64_t batch = SequencesOf(p);  // a barrier
  const auto take_place = [&](const Tile& tile, bool there) {
    return NextPlace(next, there ? BucketOf(CostOf(p, request, tile)) : -1);
  };
  ForEachTile(p, batch, request, take_place);
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
    if (threadIdx.x == 31) {
      *list.count = end;
      *list.taken = 0;
    }
  }
  __syncthreads();

  ForEachTile(p, batch, request, [&](const Tile& tile, bool there) {
    const int place = take_place(tile, there);
    if (there) list.tiles[place] = tile;
  });
}

// A pair of counts, which are summed together.
struct Counts {
  int64_t tiles, units;
};

__device__ __forceinline__ Counts InclusiveSumOverLanes(Counts x) {
  const int lane = threadIdx.x % 32;
  for (int d = 1; d < 32; d *= 2) {
    const Counts other = {__shfl_up_sync(~0u, x.tiles, d), __shfl_up_sync(~0u, x.units, d)};
    if (lane >= d) x = {x.tiles + other.tiles, x.units + other.units};
  }
  return x;
}

// The sum of x over all threads before this one, and over all of them. There must be a barrier between two calls.
__device__ Counts ExclusiveSum(const Counts& x, Counts* total) {
  __shared__ Counts of_warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Counts end = InclusiveSumOverLanes(x);
  if (lane == 31) of_warps[warp] = end;
  __syncthreads();
  const Counts ends = InclusiveSumOverLanes(of_warps[lane]);
  *total = {__shfl_sync(~0u, ends.tiles, 31), __shfl_sync(~0u, ends.units, 31)};
  const int64_t tiles = __shfl_sync(~0u, ends.tiles, max(warp - 1, 0)), units = __shfl_sync(~0u, ends.units, max(warp - 1, 0));
  return {end.tiles - x.tiles + (warp ? tiles : 0), end.units - x.units + (warp ? units : 0)};
}

// Part i of what the decode kernel gets: the rows of sequence i that count, and behind those of all sequences, if it takes
// everything, the rows that do not count and those of nobody. No row is used where the part is not for it.
__device__ Tile DecodePart(const FwdParams& p, int64_t batch, bool all, int64_t i) {
  const bool rest = i >= batch;
  const int b = static_cast<int>(rest ? i - batch : i);
  if (b >= batch) {
    const Tile nobody = FirstTile(p, batch, TilesOf::kQueries, b);
    return {static_cast<int>(p.batch), 0, nobody.q_begin, 0, nobody.q_owned, 0, 0, 0};
  }
  Tile tile = SequenceTile(p, b);
  if (rest) return {static_cast<int>(p.batch), 0, tile.q_begin + tile.q_used, 0, tile.q_owned - tile.q_used, 0, 0, 0};
  if (!all && !IsDecode(p, tile)) tile.q_used = 0;
  return tile;
}

// A thread has one part at a time, and so all its tiles.
__device__ void ListDecode(const FwdParams& p, bool all, int step, int most_shares, const DecodeList& list) {
  for (int i = threadIdx.x; i < kMaxArrived; i += kThreads) list.arrived[i] = 0;
  const auto parts_of = [&](int64_t batch) { return all ? 2 * batch + kSequencesOfNobody : batch; };
  const auto load_part = [&](int64_t batch, int64_t i) { return i < parts_of(batch) ? DecodePart(p, batch, all, i) : Tile{}; };
  Tile part = load_part(p.batch, threadIdx.x);  // on its way while all offsets are looked at
  const int64_t batch = SequencesOf(p), parts = parts_of(batch);
  if (batch != p.batch) part = load_part(batch, threadIdx.x);

  Counts before = {0, 0};
  for (int64_t first = 0; first < parts;) {
    const KeyRange seen = VisibleToAny(p, part, part.q_used);
    const bool sees = seen.lo < seen.hi;
    const int first_step = sees ? seen.lo / step : 0, steps = sees ? (seen.hi - 1) / step + 1 - first_step : 1;
    const int64_t pairs = int64_t{part.q_used} * p.group_size, tiles = (pairs + kDecodeRows - 1) / kDecodeRows;
    const int64_t units_of_tile = (p.batch_invariant ? 1 : steps) * p.num_kv_heads;
    Counts all_parts;
    const Counts mine = ExclusiveSum({tiles, tiles * units_of_tile}, &all_parts);
    for (int64_t t = 0; t < tiles; ++t) {
      DecodeTile entry = {part, first_step, steps, before.units + mine.units + t * units_of_tile};
      entry.tile.row = static_cast<int>(t * kDecodeRows);
      list.tiles[before.tiles + mine.tiles + t] = entry;
    }
    before = {before.tiles + all_parts.tiles, before.units + all_parts.units};
    first += kThreads;
    if (first < parts) {
      part = load_part(batch, first + threadIdx.x);
      __syncthreads();  // the sums have been read
    }
  }
  if (threadIdx.x == 0) {
    const int64_t units = before.units;
    const int shares = static_cast<int>(min(units, static_cast<int64_t>(most_shares)));
    const int64_t share_units = shares ? Quotient(units, shares) : 0;
    *list.head = {static_cast<int>(before.tiles), shares, units, share_units, units - share_units * shares};
  }
}

__global__ __launch_bounds__(kThreads) void schedule_kernel(const __grid_constant__ FwdParams p,
                                                            const __grid_constant__ Request request,
                                                            const __grid_constant__ WorkList list) {
  ListLongestFirst(p, request, list);
}

__global__ __launch_bounds__(kThreads) void paged_schedule_kernel(const __grid_constant__ FwdParams p,
                                                                  const __grid_constant__ Request request,
                                                                  const __grid_constant__ WorkList list, int step,
                                                                  int most_shares, const __grid_constant__ DecodeList decode) {
  if (blockIdx.x == 0) {
    ListDecode(p, gridDim.x == 1, step, most_shares, decode);
  } else {
    ListLongestFirst(p, request, list);
  }
}

}  // namespace

cudaError_t LaunchPagedSchedule(const FwdParams& params, int rows, int other_rows, const WorkList& list, int step,
                                int most_shares, const DecodeList& decode, cudaStream_t stream) {
  const Request request = {TilesOf::kQueries, rows, other_rows};
  paged_schedule_kernel<<<IsAllDecode(params) ? 1 : 2, kThreads, 0, stream>>>(params, request, list, step, most_shares, decode);
  return cudaGetLastError();
}

cudaError_t LaunchSchedule(const FwdParams& params, TilesOf side, int rows, int other_rows, const WorkList& list,
                           cudaStream_t stream) {
  schedule_kernel<<<1, kThreads, 0, stream>>>(params, Request{side, rows, other_rows}, list);
  return cudaGetLastError();
}

}  // namespace jax_varlen
