// Summing gradients on the CPU.
#pragma once

#include <cstdint>

#include "core/transfer/gradients.hpp"

namespace uec::host {

inline constexpr int32_t kMaxSources = 8;  // of one pass
inline constexpr int32_t kMaxAdded = 4;    // of one pass over a main gradient

// to[i] = sources[0][i] + ... + sources[n - 1][i] in fp32, in this order; with `more`, `to` is the
// first addend. n is 1 to kMaxSources. `to` may be one of the sources, which may lie at any
// address.
void sum_gradients(float* to, bool more, int32_t n, const uint8_t* const* sources, int64_t elements,
                   GradType type);

// main[i] += sources[0][i] + ... + sources[n - 1][i], added in fp32 in this order, and rounded once
// to the type of `main`, which is none of them. n is 1 to kMaxAdded.
void add_gradients(uint8_t* main, GradType main_type, int32_t n, const uint8_t* const* sources,
                   int64_t elements, GradType type);

}  // namespace uec::host
