// The only file that knows XLA and nanobind: the FFI handlers of the CPU and the Python module that hands them out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <utility>

#include "ffi_args.h"
#include "fwd_plan.h"
#include "isa.h"
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

ffi::Error RunFwd(const FwdParams& params, ffi::ThreadPool& pool) {
  const IsaChoice& choice = ChosenIsa();
  if (!choice.error.empty()) return ffi::Error::InvalidArgument(choice.error);
  if (const std::string error = CheckOffsets(params); !error.empty()) return ffi::Error::InvalidArgument(error);

  const int64_t num_threads = std::max<int64_t>(1, pool.num_threads());
  const auto plan = std::make_shared<FwdPlan>(params, FwdKernelFor(choice.isa, params.dtype), num_threads);
  const auto no_memory = std::make_shared<std::atomic<bool>>(false);
  RunUnits(pool, num_threads, plan->num_units(), [plan, no_memory](int64_t unit) {
    char* scratch = ThreadScratch(plan->scratch_bytes());
    if (scratch == nullptr)
      no_memory->store(true);
    else
      plan->RunUnit(unit, scratch);
  });
  if (no_memory->load())
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "varlen_attention found no memory for its scratch tiles.");
  return ffi::Error::Success();
}

ffi::Error Fwd(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens_q, Offsets cu_seqlens_k,
               Offsets seqused_q, Offsets seqused_k, Floats softmax_scale, Floats alibi_slopes, Floats sinks,
               ffi::Result<ffi::AnyBuffer> out, ffi::Result<Floats> lse, int64_t window_left, int64_t window_right,
               float softcap, ffi::ThreadPool pool) {
  FwdParams params;
  const ffi::Error error = ReadFwdArgs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale,
                                       alibi_slopes, sinks, out, lse, window_left, window_right, softcap, &params);
  if (error.failure()) return error;
  try {
    return RunFwd(params, pool);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "varlen_attention found no memory for its list of tiles.");
  }
}

XLA_FFI_DEFINE_HANDLER(FwdHandler, Fwd, BindFwdArgs().Ctx<ffi::ThreadPool>());

nb::dict Registrations() {
  nb::dict targets;
  targets["jax_varlen_fwd_v1"] = nb::capsule(reinterpret_cast<void*>(FwdHandler));
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
