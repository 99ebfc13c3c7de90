#include "core/plan/planner.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "objective.hpp"
#include "unlocked.hpp"

namespace nb = nanobind;

namespace uec::python {
namespace {

std::tuple<Output<int32_t>, Output<int32_t>, Output<int32_t>> plan_replicas_numpy(
    const Input<int64_t, 1>& load, const Input<int32_t, 1>& home, const Input<int32_t, 1>& domain,
    int32_t slots_per_rank, bool allow_cross_domain, int64_t target_ppm,
    const std::optional<Costs>& costs) {
  const Topology topology{.num_ranks = static_cast<int32_t>(domain.size()),
                          .num_experts = static_cast<int32_t>(load.size()),
                          .slots_per_rank = slots_per_rank,
                          .home = home.data(),
                          .domain = domain.data(),
                          .allow_cross_domain = allow_cross_domain};
  if (topology.num_ranks < 1) reject("length of domain", topology.num_ranks, "at least 1 rank");
  if (slots_per_rank < 0) reject("slots_per_rank", slots_per_rank, "0 or more");
  require_equal("length of home", home.size(), topology.num_experts);
  require_homes(topology);
  const Objective objective = make_objective(target_ppm, costs);
  int64_t total = 0;
  for (size_t e = 0; e < load.size(); ++e) {
    if (load.data()[e] < 0 || load.data()[e] > kMaxLoad) {
      reject("load[" + std::to_string(e) + "]", load.data()[e], "0 to " + std::to_string(kMaxLoad));
    }
    total += load.data()[e];
  }
  if (total > kMaxTotalLoad)
    reject("sum of load", total, "at most " + std::to_string(kMaxTotalLoad));

  const size_t num_ranks = domain.size();
  const size_t num_slots = num_ranks * static_cast<size_t>(slots_per_rank);
  auto slot_expert = std::make_unique_for_overwrite<int32_t[]>(num_slots);
  auto slot_quota = std::make_unique_for_overwrite<int32_t[]>(num_slots);
  auto home_quota = std::make_unique_for_overwrite<int32_t[]>(load.size());
  {
    const Unlocked unlocked;
    const auto scratch = std::make_unique_for_overwrite<std::byte[]>(
        static_cast<size_t>(planner_scratch_bytes(topology)));
    plan_replicas(topology, load.data(), objective, PlannerScratch(topology, scratch.get()),
                  slot_expert.get(), slot_quota.get(), home_quota.get());
  }
  const size_t slots = static_cast<size_t>(slots_per_rank);
  return {to_numpy(std::move(slot_expert), {num_ranks, slots}),
          to_numpy(std::move(slot_quota), {num_ranks, slots}),
          to_numpy(std::move(home_quota), {load.size()})};
}

}  // namespace

void bind_planner(nb::module_& m) {
  m.def("plan_replicas", &plan_replicas_numpy, nb::arg("load").noconvert(),
        nb::arg("home").noconvert(), nb::arg("domain").noconvert(), nb::arg("slots_per_rank"),
        nb::arg("allow_cross_domain"), nb::arg("target_ppm"), nb::arg("costs") = nb::none(),
        nb::sig("def plan_replicas(load: ndarray[dtype=int64], home: ndarray[dtype=int32], "
                "domain: ndarray[dtype=int32], slots_per_rank: int, allow_cross_domain: bool, "
                "target_ppm: int, costs: tuple[int, int, int] | None = None) -> "
                "tuple[ndarray[dtype=int32], ndarray[dtype=int32], ndarray[dtype=int32]]"),
        "Returns (slot_expert [G, S], slot_quota [G, S], home_quota [E]).");
}

}  // namespace uec::python
