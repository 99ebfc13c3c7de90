// A mode argument; None: chosen by the cost model.
#pragma once

#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

#include "core/schedule/schedule.hpp"

namespace uec::python {

using GivenMode = std::optional<Mode>;

// The core's number for it.
inline int32_t number_of(GivenMode mode) { return mode ? static_cast<int32_t>(*mode) : -1; }

}  // namespace uec::python
