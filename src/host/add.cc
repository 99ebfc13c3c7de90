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

// Inlined into functions that are each compiled for one kind of processor, with its vectors.
// Gradients may lie at any address, so elements are copied out.
#define UEC_ALWAYS_INLINE [[gnu::always_inline]] inline
#define UEC_LAMBDA_INLINE __attribute__((always_inline))  // of a lambda

template <class Bits>
UEC_ALWAYS_INLINE Bits bits_at(const uint8_t* from, int64_t i) {
  Bits bits;
  std::memcpy(&bits, from + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
  return bits;
}

UEC_ALWAYS_INLINE float element(const uint8_t* from, int64_t i, GradType type) {
  return type == GradType::kFloat32 ? bits_at<float>(from, i)
                                    : from_bfloat16(bits_at<uint16_t>(from, i));
}

// Adds element i of each source after the first, in order.
template <GradType kType, int32_t kSources>
UEC_ALWAYS_INLINE float add_rest(float value, const uint8_t* const* from, int64_t i) {
#pragma GCC unroll 8
  for (int32_t s = 1; s < kSources; ++s) value += element(from[s], i, kType);
  return value;
}

template <GradType kType, int32_t kSources, bool kMore>
UEC_ALWAYS_INLINE void sum(float* to, const uint8_t* const* sources, int64_t elements) {
  const uint8_t* from[kSources];
  for (int32_t s = 0; s < kSources; ++s) from[s] = sources[s];
  // Reads and writes equal i only: `to` may be one of them.
#pragma GCC ivdep
  for (int64_t i = 0; i < elements; ++i) {
    const float first = element(from[0], i, kType);
    to[i] = add_rest<kType, kSources>(kMore ? to[i] + first : first, from, i);
  }
}

template <GradType kMain, GradType kType, int32_t kSources>
UEC_ALWAYS_INLINE void add(uint8_t* main, const uint8_t* const* sources, int64_t elements) {
  const uint8_t* from[kSources];
  for (int32_t s = 0; s < kSources; ++s) from[s] = sources[s];
#pragma GCC ivdep
  for (int64_t i = 0; i < elements; ++i) {
    const float first = element(from[0], i, kType);
    const float sum = add_rest<kType, kSources>(first, from, i);
    const float value = element(main, i, kMain) + sum;
    if constexpr (kMain == GradType::kFloat32) {
      std::memcpy(main + 4 * i, &value, 4);
    } else {
      const uint16_t rounded = to_bfloat16(value);
      std::memcpy(main + 2 * i, &rounded, 2);
    }
  }
}

// Turns what is known when a pass begins into constants of its loop: calls of.operator()<type>(),
// and of.operator()<n>() for n of 1 to kMost.
template <class Of>
UEC_ALWAYS_INLINE void with_type(GradType type, const Of& of) {
  if (type == GradType::kFloat32)
    of.template operator()<GradType::kFloat32>();
  else
    of.template operator()<GradType::kBFloat16>();
}

template <int32_t kMost, class Of>
UEC_ALWAYS_INLINE void with_count(int32_t n, const Of& of) {
  if constexpr (kMost > 1)
    if (n < kMost) return with_count<kMost - 1>(n, of);
  of.template operator()<kMost>();
}

UEC_ALWAYS_INLINE void sum_any(float* to, bool more, int32_t n, const uint8_t* const* sources,
                               int64_t elements, GradType type) {
  with_type(type, [&]<GradType kType>() UEC_LAMBDA_INLINE {
    with_count<kMaxSources>(n, [&]<int32_t kSources>() UEC_LAMBDA_INLINE {
      more ? sum<kType, kSources, true>(to, sources, elements)
           : sum<kType, kSources, false>(to, sources, elements);
    });
  });
}

UEC_ALWAYS_INLINE void add_any(uint8_t* main, GradType main_type, int32_t n,
                               const uint8_t* const* sources, int64_t elements, GradType type) {
  with_type(main_type, [&]<GradType kMain>() UEC_LAMBDA_INLINE {
    with_type(type, [&]<GradType kType>() UEC_LAMBDA_INLINE {
      with_count<kMaxAdded>(n, [&]<int32_t kSources>() UEC_LAMBDA_INLINE {
        add<kMain, kType, kSources>(main, sources, elements);
      });
    });
  });
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
