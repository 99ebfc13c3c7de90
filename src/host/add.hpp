// Adding up gradients on the CPU.
#pragma once

#include <cstdint>

#include "core/gradients.hpp"

namespace uec::host {

inline constexpr int32_t kMaxSources = 8;  // of one pass

// to[i] = sources[0][i] + ... + sources[n - 1][i] in fp32, in this order; with `more`, `to` goes
// before them. n is 1 to kMaxSources. `to` may be one of the sources.
void sum_gradients(float* to, bool more, int32_t n, const uint8_t* const* sources, int64_t elements,
                   GradType type);

// main[i] += sum[i], rounded to the type of `main`.
void add_gradients(uint8_t* main, GradType type, const float* sum, int64_t elements);

}  // namespace uec::host
