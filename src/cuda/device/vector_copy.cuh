// Copies by a warp's ordinary loads and stores: for addresses and sizes that bulk copies cannot
// take.
#pragma once

#include <cstdint>

#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"

namespace uec::cuda {

namespace detail {

// Loads in flight before the first store. Of what comes in 16 bytes bulk copies take most, and
// registers matter more.
template <class T>
inline constexpr int32_t kUnrolled = sizeof(T) < 16 ? 8 : 1;

// `Load` reads an element: global memory that peers write needs loads of its own. The outer loops
// are not unrolled by the compiler: that would take more registers than there are.
template <class T, class Load>
UEC_DEVICE void copy_elements(T* to, const T* from, int64_t count, Load load) {
  constexpr int32_t kStep = Warp::size(), kTogether = kUnrolled<T>;
  int64_t i = Warp::index();
#pragma unroll 1
  for (; i + (kTogether - 1) * kStep < count; i += kTogether * kStep) {
    T values[kTogether];
#pragma unroll
    for (int32_t j = 0; j < kTogether; ++j) values[j] = load(from + i + j * kStep);
#pragma unroll
    for (int32_t j = 0; j < kTogether; ++j) to[i + j * kStep] = values[j];
  }
#pragma unroll 1
  for (; i < count; i += kStep) to[i] = load(from + i);
}

template <class T, class Load>
UEC_DEVICE void copy_as(uint8_t* to, const uint8_t* from, int64_t bytes, Load load) {
  const int64_t whole = bytes / static_cast<int64_t>(sizeof(T));
  copy_elements(reinterpret_cast<T*>(to), reinterpret_cast<const T*>(from), whole, load);
  const int64_t done = whole * static_cast<int64_t>(sizeof(T));
  copy_elements(to + done, from + done, bytes - done, load);
}

// Copies with the widest element that both addresses allow.
template <class Load>
UEC_DEVICE void copy(uint8_t* to, const uint8_t* from, int64_t bytes, Load load) {
  const uint64_t low = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
  if (low % 16 == 0) return copy_as<uint4>(to, from, bytes, load);
  if (low % 4 == 0) return copy_as<uint32_t>(to, from, bytes, load);
  if (low % 2 == 0) return copy_as<uint16_t>(to, from, bytes, load);
  copy_elements(to, from, bytes, load);
}

}  // namespace detail

// Called by a whole warp; the caller synchronises.
UEC_DEVICE void copy_from_global(uint8_t* to, const uint8_t* from, int64_t bytes) {
  detail::copy(to, from, bytes, [](const auto* at) { return ptx::load_global(at); });
}
UEC_DEVICE void copy_from_shared(uint8_t* to, const uint8_t* from, int64_t bytes) {
  detail::copy(to, from, bytes, [](const auto* at) { return *at; });
}

}  // namespace uec::cuda
