// The only file that knows XLA and nanobind: the FFI handlers of the CPU and the Python module that hands them out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <utility>

#include "append.h"
#include "bwd_plan.h"
#include "ffi_args.h"
#include "fwd_plan.h"
#include "isa.h"
#include "offsets.h"
#include "pool.h"

namespace nb = nanobind;

namespace jax_varlen {
namespace {

// A thread's own memory, kept for its next unit. Null when there is none to be had.
char* ThreadScratch(size_t bytes) {
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local size_t size = 0;
  if (size < bytes) {
    memory.reset();
    memory.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{64}, std::nothrow)));
    size = memory == nullptr ? 0 : bytes;
  }
  return memory.get();
}

ffi::Error NoMemory(const char* what) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("varlen_attention found no memory for its ") + what + ".");
}

void GiveUp(FwdPlan&) {}
void GiveUp(BwdPlan& plan) {
  plan.Abandon();
}

template <typename Plan>
ffi::Error RunPlan(const std::shared_ptr<Plan>& plan, int64_t num_threads, ffi::ThreadPool& pool) {
  const auto no_memory = std::make_shared<std::atomic<bool>>(false);
  RunUnits(pool, num_threads, plan->num_units(), [plan, no_memory](int64_t unit) {
    char* scratch = ThreadScratch(plan->scratch_bytes());
    if (scratch != nullptr) return plan->RunUnit(unit, scratch);
    no_memory->store(true);
    GiveUp(*plan);
  });
  return no_memory->load() ? NoMemory("scratch tiles") : ffi::Error::Success();
}

// What both passes do first. `Plan` is made of the params and of the kernel that kernel_for names.
template <typename Plan, typename Params, typename KernelFor>
ffi::Error Run(const Params& params, const FwdParams& fwd, const KernelFor& kernel_for, ffi::ThreadPool& pool) {
  const IsaChoice& choice = ChosenIsa();
  if (!choice.error.empty()) return ffi::Error::InvalidArgument(choice.error);
  if (const std::string error = CheckOffsets(fwd); !error.empty()) return ffi::Error::InvalidArgument(error);
  const int64_t num_threads = std::max<int64_t>(1, pool.num_threads());
  try {
    return RunPlan(std::make_shared<Plan>(params, kernel_for(choice.isa, fwd), num_threads), num_threads, pool);
  } catch (const std::bad_alloc&) {
    return NoMemory("list of tiles");
  }
}

ffi::Error Fwd(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens_q, Offsets cu_seqlens_k,
               Offsets seqused_q, Offsets seqused_k, Offsets block_table, Floats softmax_scale, Floats alibi_slopes,
               Floats sinks, Floats k_scale, Floats v_scale, ffi::Result<ffi::AnyBuffer> out, ffi::Result<Floats> lse,
               int64_t window_left, int64_t window_right, float softcap, int64_t batch_invariant, ffi::ThreadPool pool) {
  FwdParams params;
  const ffi::Error error = ReadFwdArgs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, alibi_slopes,
                                       {block_table, sinks, k_scale, v_scale}, out, lse, window_left, window_right, softcap,
                                       batch_invariant, &params);
  if (error.failure()) return error;
  return Run<FwdPlan>(params, params, FwdKernelFor, pool);
}

ffi::Error Bwd(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens_q, Offsets cu_seqlens_k,
               Offsets seqused_q, Offsets seqused_k, Floats softmax_scale, Floats alibi_slopes, ffi::AnyBuffer dout, Floats lse,
               Floats delta, ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv,
               int64_t window_left, int64_t window_right, float softcap, ffi::ThreadPool pool) {
  BwdParams params;
  const ffi::Error error =
      ReadBwdArgs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, alibi_slopes, dout, lse, delta, dq,
                  dk, dv, window_left, window_right, softcap, q.element_type(), &params);
  if (error.failure()) return error;
  return Run<BwdPlan>(params, params.fwd, BwdKernelFor, pool);
}

ffi::Error AppendKv(ffi::AnyBuffer k_cache, ffi::AnyBuffer v_cache, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens,
                    Offsets seqused_k, Offsets block_table, Floats k_scale, Floats v_scale,
                    ffi::Result<ffi::AnyBuffer> k_result, ffi::Result<ffi::AnyBuffer> v_result, ffi::ThreadPool pool) {
  AppendParams params;
  const ffi::Error error =
      ReadAppendArgs(k_cache, v_cache, k, v, cu_seqlens, seqused_k, block_table, k_scale, v_scale, k_result, v_result, &params);
  if (error.failure()) return error;
  if (const std::string error = CheckAppend(params); !error.empty()) return ffi::Error::InvalidArgument(error);
  const int64_t begin = params.cu_seqlens[0], end = params.cu_seqlens[params.batch], rows = AppendRowsPerUnit(params);
  const int64_t num_threads = std::max<int64_t>(1, pool.num_threads());
  RunUnits(pool, num_threads, (end - begin + rows - 1) / rows, [params, begin, end, rows](int64_t unit) {
    Append(params, begin + unit * rows, std::min(end, begin + (unit + 1) * rows));
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(FwdHandler, Fwd, BindFwdArgs().Ctx<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER(BwdHandler, Bwd, BindBwdArgs().Ctx<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER(AppendHandler, AppendKv, BindAppendArgs().Ctx<ffi::ThreadPool>());

nb::dict Registrations() {
  nb::dict targets;
  targets["jax_varlen_fwd_v1"] = nb::capsule(reinterpret_cast<void*>(FwdHandler));
  targets["jax_varlen_bwd_v1"] = nb::capsule(reinterpret_cast<void*>(BwdHandler));
  targets["jax_varlen_append_v1"] = nb::capsule(reinterpret_cast<void*>(AppendHandler));
  return targets;
}

std::string IsaOfThisMachine() {
  const IsaChoice& choice = ChosenIsa();
  if (!choice.error.empty()) throw nb::value_error(choice.error.c_str());
  return IsaName(choice.isa);
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.def("registrations", Registrations);
  m.def("ffi_api_version", [] { return std::make_pair(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("isa", IsaOfThisMachine);
}

}  // namespace jax_varlen
