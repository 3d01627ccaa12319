// What a launch needs to know of the device.
#pragma once

namespace jax_varlen {

struct Device {
  int smem_bytes;  // that a CTA may use
  int multiprocessors;
  int major;  // of the compute capability
};

}  // namespace jax_varlen
