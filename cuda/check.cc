#include "check.h"

#include <deque>
#include <vector>

#include "offsets.h"

namespace jax_varlen {
namespace {

// Arrays of the device, on the host once Wait is through.
class HostCopies {
 public:
  explicit HostCopies(cudaStream_t stream) : stream_(stream) {}

  // Makes `array` of `n` elements, unless it is null, point to its copy.
  void Take(const int32_t** array, int64_t n) {
    if (*array == nullptr) return;
    std::vector<int32_t>& copy = copies_.emplace_back(n);
    const cudaError_t error = cudaMemcpyAsync(copy.data(), *array, n * sizeof(int32_t), cudaMemcpyDeviceToHost, stream_);
    if (error_ == cudaSuccess) error_ = error;
    *array = copy.data();
  }

  cudaError_t Wait() const {
    const cudaError_t error = cudaStreamSynchronize(stream_);
    return error_ == cudaSuccess ? error : error_;
  }

 private:
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
  std::deque<std::vector<int32_t>> copies_;
};

}  // namespace

cudaError_t CheckOnDevice(FwdParams p, cudaStream_t stream, std::string* wrong) {
  HostCopies copies(stream);
  copies.Take(&p.cu_seqlens_q, p.batch + 1);
  copies.Take(&p.cu_seqlens_k, p.batch + 1);
  copies.Take(&p.seqused_q, p.batch);
  copies.Take(&p.seqused_k, p.batch);
  copies.Take(&p.block_table, p.batch * p.max_blocks);
  const cudaError_t error = copies.Wait();
  if (error == cudaSuccess) *wrong = CheckOffsets(p);
  return error;
}

cudaError_t CheckOnDevice(AppendParams p, cudaStream_t stream, std::string* wrong) {
  HostCopies copies(stream);
  copies.Take(&p.cu_seqlens, p.batch + 1);
  copies.Take(&p.seqused_k, p.batch);
  copies.Take(&p.block_table, p.batch * p.max_blocks);
  const cudaError_t error = copies.Wait();
  if (error == cudaSuccess) *wrong = CheckAppend(p);
  return error;
}

}  // namespace jax_varlen
