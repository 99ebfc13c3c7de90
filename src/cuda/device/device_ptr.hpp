// Addresses in the structs that host and device share.
#pragma once

#include <cstdint>

#include "core/base/common.hpp"

namespace uec::cuda {

// A pointer for kernels; for the host, which cannot follow it, an integer. 0: there is nothing.
template <class T>
struct DevicePtr {
  DevicePtr() = default;  // trivial, for unions
  UEC_HD constexpr DevicePtr(uint64_t at) : address(at) {}
  UEC_HD operator T*() const { return reinterpret_cast<T*>(address); }

  uint64_t address;
};

}  // namespace uec::cuda
