// Types that every part of the core shares. No CUDA include, no exception, no allocation.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define UEC_HD __host__ __device__
// Never inlined on a device: its code exists once, and its registers do not add to its caller's.
#define UEC_HD_NOINLINE __host__ __device__ __noinline__
// Marks a loop that runs once or twice on a device: unrolled, it would only be more code to fetch.
#define UEC_ROLLED _Pragma("unroll 1")
#define UEC_UNROLLED _Pragma("unroll")
#define UEC_UNROLLED_BY_4 _Pragma("unroll 4")  // whose loads then arrive together
#else
#define UEC_HD
#define UEC_HD_NOINLINE
#define UEC_ROLLED
#define UEC_UNROLLED
#define UEC_UNROLLED_BY_4
#endif

namespace uec {

// The group's constants. Arrays are borrowed and outlive every call on the group.
struct Topology {
  int32_t num_ranks = 0;            // G
  int32_t num_experts = 0;          // E
  int32_t slots_per_rank = 0;       // S
  const int32_t* home = nullptr;    // [E] owner of each expert
  const int32_t* domain = nullptr;  // [G] ranks with equal values reach each other's memory
  bool allow_cross_domain = false;

  UEC_HD bool may_hold(int32_t expert, int32_t rank) const {
    return home[expert] != rank && (allow_cross_domain || domain[home[expert]] == domain[rank]);
  }
};

UEC_HD constexpr int32_t max32(int32_t a, int32_t b) { return a > b ? a : b; }
UEC_HD constexpr int32_t min32(int32_t a, int32_t b) { return a < b ? a : b; }
UEC_HD constexpr uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
UEC_HD constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
UEC_HD constexpr int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
UEC_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// a / b. In 32 bits where they suffice: a device divides those four times as fast.
UEC_HD constexpr int64_t divide(int64_t a, int64_t b) {
  return (a | b) >> 32 == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}
// Returns the width of a number that is not negative.
UEC_HD inline int32_t num_bits(int64_t number) {
#if defined(__CUDA_ARCH__)
  return 64 - __clzll(number);
#else
  return number == 0 ? 0 : 64 - __builtin_clzll(static_cast<uint64_t>(number));
#endif
}
UEC_HD constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Divides by the same number again and again: a product, which is at most 1 too small, where the
// dividend has 32 bits.
class Divider {
 public:
  UEC_HD explicit constexpr Divider(uint32_t by) : by_(by), inverse_(~uint32_t{0} / by) {}
  UEC_HD constexpr uint64_t operator()(uint64_t a) const {
    return a >> 32 != 0 ? a / by_ : near(static_cast<uint32_t>(a));
  }
  UEC_HD constexpr uint32_t near(uint32_t a) const {
    const auto low = static_cast<uint32_t>(uint64_t{a} * inverse_ >> 32);
    return low + (a - low * by_ >= by_);
  }

 private:
  uint32_t by_, inverse_;
};

}  // namespace uec
