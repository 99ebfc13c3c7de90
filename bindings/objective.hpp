// The planner's objective, from Python arguments.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "arrays.hpp"
#include "core/plan/search.hpp"

namespace uec::python {

using Costs = std::tuple<int64_t, int64_t, int64_t>;  // of a token, a unit of transfer, a replica

inline Objective make_objective(int64_t target_ppm, const std::optional<Costs>& costs) {
  if (target_ppm < kPpm || target_ppm > kMaxTargetPpm)
    reject("target_ppm", target_ppm, std::to_string(kPpm) + " to " + std::to_string(kMaxTargetPpm));
  Objective objective{.target_ppm = target_ppm, .by_cost = costs.has_value()};
  if (!costs) return objective;
  std::tie(objective.per_token, objective.per_transfer, objective.per_replica) = *costs;
  const auto require_cost = [](const char* name, int64_t value, int bits) {
    if (value < 0 || value >> bits != 0)
      reject(name, value, "0 to 2^" + std::to_string(bits) + " - 1");
  };
  require_cost("the cost of a token", objective.per_token, 22);
  require_cost("the cost of a unit of transfer", objective.per_transfer, 40);
  require_cost("the cost of a replica", objective.per_replica, 40);
  return objective;
}

}  // namespace uec::python
