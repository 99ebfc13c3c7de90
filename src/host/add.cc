#include "host/add.hpp"

#include <cstring>

// Sanitizers do not see functions with their own target attribute.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define UEC_WIDE_ADDS 1
#else
#define UEC_WIDE_ADDS 0
#endif

namespace uec::host {
namespace {

// Inlined into functions for one kind of processor each: their compiler knows its vectors.
// Gradients may lie at any address, so elements are copied out.
#define UEC_INTO_EACH [[gnu::always_inline]] inline

template <class Bits>
UEC_INTO_EACH Bits bits_at(const uint8_t* from, int64_t i) {
  Bits bits;
  std::memcpy(&bits, from + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
  return bits;
}

UEC_INTO_EACH float element(const uint8_t* from, int64_t i, GradType type) {
  return type == GradType::kFloat32 ? bits_at<float>(from, i)
                                    : from_bfloat16(bits_at<uint16_t>(from, i));
}

// Adds elements i of the sources behind the first, in their order.
template <GradType kType, int32_t kSources>
UEC_INTO_EACH float and_the_others(float value, const uint8_t* const* from, int64_t i) {
#pragma GCC unroll 8
  for (int32_t s = 1; s < kSources; ++s) value += element(from[s], i, kType);
  return value;
}

template <GradType kType, int32_t kSources, bool kMore>
UEC_INTO_EACH void sum(float* to, const uint8_t* const* sources, int64_t elements) {
  const uint8_t* from[kSources];
  for (int32_t s = 0; s < kSources; ++s) from[s] = sources[s];
  // Of equal i alone: `to` may be one of them.
#pragma GCC ivdep
  for (int64_t i = 0; i < elements; ++i) {
    const float first = element(from[0], i, kType);
    to[i] = and_the_others<kType, kSources>(kMore ? to[i] + first : first, from, i);
  }
}

template <GradType kType, bool kMore>
UEC_INTO_EACH void sum_n(float* to, int32_t n, const uint8_t* const* sources, int64_t elements) {
  switch (n) {
    case 1:
      return sum<kType, 1, kMore>(to, sources, elements);
    case 2:
      return sum<kType, 2, kMore>(to, sources, elements);
    case 3:
      return sum<kType, 3, kMore>(to, sources, elements);
    case 4:
      return sum<kType, 4, kMore>(to, sources, elements);
    case 5:
      return sum<kType, 5, kMore>(to, sources, elements);
    case 6:
      return sum<kType, 6, kMore>(to, sources, elements);
    case 7:
      return sum<kType, 7, kMore>(to, sources, elements);
    default:
      return sum<kType, 8, kMore>(to, sources, elements);
  }
}

UEC_INTO_EACH void sum_any(float* to, bool more, int32_t n, const uint8_t* const* sources,
                           int64_t elements, GradType type) {
  if (type == GradType::kFloat32)
    more ? sum_n<GradType::kFloat32, true>(to, n, sources, elements)
         : sum_n<GradType::kFloat32, false>(to, n, sources, elements);
  else
    more ? sum_n<GradType::kBFloat16, true>(to, n, sources, elements)
         : sum_n<GradType::kBFloat16, false>(to, n, sources, elements);
}

template <GradType kMain, GradType kType, int32_t kSources>
UEC_INTO_EACH void add(uint8_t* main, const uint8_t* const* sources, int64_t elements) {
  const uint8_t* from[kSources];
  for (int32_t s = 0; s < kSources; ++s) from[s] = sources[s];
#pragma GCC ivdep
  for (int64_t i = 0; i < elements; ++i) {
    const float first = element(from[0], i, kType);
    const float sum = and_the_others<kType, kSources>(first, from, i);
    const float value = element(main, i, kMain) + sum;
    if constexpr (kMain == GradType::kFloat32) {
      std::memcpy(main + 4 * i, &value, 4);
    } else {
      const uint16_t rounded = to_bfloat16(value);
      std::memcpy(main + 2 * i, &rounded, 2);
    }
  }
}

template <GradType kMain, GradType kType>
UEC_INTO_EACH void add_n(uint8_t* main, int32_t n, const uint8_t* const* sources,
                         int64_t elements) {
  switch (n) {
    case 1:
      return add<kMain, kType, 1>(main, sources, elements);
    case 2:
      return add<kMain, kType, 2>(main, sources, elements);
    case 3:
      return add<kMain, kType, 3>(main, sources, elements);
    default:
      return add<kMain, kType, 4>(main, sources, elements);
  }
}

UEC_INTO_EACH void add_any(uint8_t* main, GradType main_type, int32_t n,
                           const uint8_t* const* sources, int64_t elements, GradType type) {
  if (main_type == GradType::kFloat32)
    type == GradType::kFloat32
        ? add_n<GradType::kFloat32, GradType::kFloat32>(main, n, sources, elements)
        : add_n<GradType::kFloat32, GradType::kBFloat16>(main, n, sources, elements);
  else
    type == GradType::kFloat32
        ? add_n<GradType::kBFloat16, GradType::kFloat32>(main, n, sources, elements)
        : add_n<GradType::kBFloat16, GradType::kBFloat16>(main, n, sources, elements);
}

using Sum = void (*)(float*, bool, int32_t, const uint8_t* const*, int64_t, GradType);
using Add = void (*)(uint8_t*, GradType, int32_t, const uint8_t* const*, int64_t, GradType);

struct Functions {
  Sum sum;
  Add add;
};

#define UEC_FUNCTIONS(name, attributes)                                                        \
  attributes void sum_##name(float* to, bool more, int32_t n, const uint8_t* const* sources,   \
                             int64_t elements, GradType type) {                                \
    sum_any(to, more, n, sources, elements, type);                                             \
  }                                                                                            \
  attributes void add_##name(uint8_t* main, GradType main_type, int32_t n,                     \
                             const uint8_t* const* sources, int64_t elements, GradType type) { \
    add_any(main, main_type, n, sources, elements, type);                                      \
  }

UEC_FUNCTIONS(plain, )
#if UEC_WIDE_ADDS
UEC_FUNCTIONS(avx2, __attribute__((target("avx2"))))
UEC_FUNCTIONS(avx512, __attribute__((target("avx512f,avx512bw,avx512vl"))))
#endif

Functions choose() {
#if UEC_WIDE_ADDS
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    return {sum_avx512, add_avx512};
  if (__builtin_cpu_supports("avx2")) return {sum_avx2, add_avx2};
#endif
  return {sum_plain, add_plain};
}

const Functions functions = choose();

}  // namespace

void sum_gradients(float* to, bool more, int32_t n, const uint8_t* const* sources, int64_t elements,
                   GradType type) {
  functions.sum(to, more, n, sources, elements, type);
}

void add_gradients(uint8_t* main, GradType main_type, int32_t n, const uint8_t* const* sources,
                   int64_t elements, GradType type) {
  functions.add(main, main_type, n, sources, elements, type);
}

}  // namespace uec::host
