#include "dispatch.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>

#include "decode.h"
#include "fwd_sm80.h"
#include "fwd_sm90.h"
#include "schedule.h"
#include "tile_config.h"

namespace jax_varlen {
namespace {

constexpr int kMinTile = 32;  // the least rows of a tile of any kernel, which bounds the number of tiles

// What the device is, or one with less shared memory where JAX_VARLEN_CUDA_SMEM says so: a large device then runs the kernels
// of a small one, for tests and comparison.
cudaError_t ThisDevice(Device* device) {
  int id;
  if (cudaError_t error = cudaGetDevice(&id)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&device->smem_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id))
    return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, id)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&device->major, cudaDevAttrComputeCapabilityMajor, id)) return error;
  if (const char* limit = std::getenv("JAX_VARLEN_CUDA_SMEM"))
    device->smem_bytes = std::min(device->smem_bytes, std::atoi(limit));
  return cudaSuccess;
}

// Rows of q that a tile of the decode kernel can have.
int64_t MaxDecodeRows(const FwdParams& params) {
  return std::min<int64_t>(kDecodeRows, params.total_q * params.group_size);
}

int64_t DecodeListWords(const FwdParams& params) {
  return kWordsPerDecodeTile * (1 + MaxDecodeTiles(params)) + kMaxArrived;
}

// The Hopper kernel takes what it can where JAX_VARLEN_CUDA_SM90 is 1: docs/tuning.md says what it still lacks.
bool IsForSm90(const FwdParams& params, const Device& device) {
  const char* choice = std::getenv("JAX_VARLEN_CUDA_SM90");
  return choice != nullptr && std::strcmp(choice, "1") == 0 && device.major == 9 && device.smem_bytes >= kSm90SmemBytes &&
         params.total_k > 0 && params.total_k <= INT_MAX && params.block_size % 8 == 0 && params.kv_dtype == params.dtype;
}

template <DType dtype>
cudaError_t FwdAs(const FwdParams& params, int32_t* workspace, const Device& device, cudaStream_t stream) {
  const int64_t list_words = WorkspaceWords(params.total_q, params.batch);
  FwdWorkspace lists = {WorkListIn(workspace), {}, 0};
  if (params.block_size == 0)
    return IsForSm90(params, device) ? FwdSm90<dtype>(params, lists, device, stream)
                                     : FwdSm80<dtype, false>(params, lists, device, stream);
  lists.decode = DecodeListIn(workspace + list_words);
  lists.most_shares = std::min(kMaxShares, kDecodeCtas * device.multiprocessors);
  Partials partials;
  partials.arrived = lists.decode.arrived;
  partials.shares = lists.most_shares;
  partials.rows = static_cast<int>(MaxDecodeRows(params));
  partials.out = reinterpret_cast<float*>(workspace + list_words + DecodeListWords(params));
  partials.lse = partials.out + 2 * int64_t{partials.shares} * partials.rows * params.head_dim_v;
  cudaError_t error = IsForSm90(params, device) ? FwdSm90<dtype>(params, lists, device, stream)
                                                : FwdSm80<dtype, true>(params, lists, device, stream);
  if (error) return error;
  return params.kv_dtype == DType::kE4M3 ? Decode<dtype, DType::kE4M3>(params, lists.decode, partials, stream)
                                         : Decode<dtype, dtype>(params, lists.decode, partials, stream);
}

}  // namespace

int64_t WorkspaceWords(int64_t total, int64_t batch) {
  return kWordsPerTile * (1 + MaxTiles(total, batch, kMinTile));
}

int64_t FwdWorkspaceWords(const FwdParams& params) {
  const int64_t words = WorkspaceWords(params.total_q, params.batch);
  if (params.block_size == 0) return words;
  return words + DecodeListWords(params) + 2 * int64_t{kMaxShares} * MaxDecodeRows(params) * (params.head_dim_v + 1);
}

int64_t DqTiles(const FwdParams& params) {
  return params.total_q / kMinTile + params.batch + 1;
}

cudaError_t Fwd(const FwdParams& params, int32_t* workspace, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = ThisDevice(&device)) return error;
  return params.dtype == DType::kBF16 ? FwdAs<DType::kBF16>(params, workspace, device, stream)
                                      : FwdAs<DType::kF16>(params, workspace, device, stream);
}

cudaError_t Bwd(const BwdParams& params, int32_t* workspace, const Turns& turns, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = ThisDevice(&device)) return error;
  const WorkList list = WorkListIn(workspace);
  return params.fwd.dtype == DType::kBF16 ? BwdSm80<DType::kBF16>(params, list, turns, device.smem_bytes, stream)
                                          : BwdSm80<DType::kF16>(params, list, turns, device.smem_bytes, stream);
}

}  // namespace jax_varlen
