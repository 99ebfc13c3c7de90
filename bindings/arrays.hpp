// Array arguments and results of the bindings: CPU memory, dense, row-major, from any library.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

#include "core/base/common.hpp"

namespace uec::python {

template <typename T, int kDims>
using Input =
    nanobind::ndarray<const T, nanobind::ndim<kDims>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using Output = nanobind::ndarray<nanobind::numpy, T>;

// Raises ValueError "<name> is <value>; expected <expected>".
[[noreturn]] inline void reject(const std::string& name, int64_t value,
                                const std::string& expected) {
  throw nanobind::value_error(
      (name + " is " + std::to_string(value) + "; expected " + expected).c_str());
}

inline void require_equal(const std::string& name, size_t value, int64_t expected) {
  if (static_cast<int64_t>(value) != expected) {
    reject(name, static_cast<int64_t>(value), std::to_string(expected));
  }
}

// The core indexes by home without bounds checks, so they are here.
inline void require_homes(const Topology& topology) {
  for (int32_t e = 0; e < topology.num_experts; ++e) {
    if (topology.home[e] < 0 || topology.home[e] >= topology.num_ranks) {
      reject("home[" + std::to_string(e) + "]", topology.home[e],
             "a rank below " + std::to_string(topology.num_ranks));
    }
  }
}

// A new NumPy array that owns `data`. Needs the GIL.
template <typename T>
Output<T> to_numpy(std::unique_ptr<T[]> data, std::initializer_list<size_t> shape) {
  nanobind::capsule owner(data.get(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return Output<T>(data.release(), shape, owner);
}

}  // namespace uec::python
