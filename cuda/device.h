// What a launch needs to know of the device.
#pragma once

namespace jax_varlen {

struct Device {
  int smem_bytes;  // that a CTA may use
  int multiprocessors;
};

}  // namespace jax_varlen
