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
#include "core/plan/check.hpp"
#include "core/plan/resident_planner.hpp"
#include "objective.hpp"
#include "unlocked.hpp"

namespace nb = nanobind;

namespace uec::python {
namespace {

using Arrays = std::tuple<Output<int32_t>, Output<int32_t>, Output<int32_t>>;

Topology checked_topology(const Input<int64_t, 1>& load, const Input<int32_t, 1>& home,
                          const Input<int32_t, 1>& domain, int32_t slots_per_rank,
                          bool allow_cross_domain) {
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
  int64_t total = 0;
  for (size_t e = 0; e < load.size(); ++e) {
    if (load.data()[e] < 0 || load.data()[e] > kMaxLoad) {
      reject("load[" + std::to_string(e) + "]", load.data()[e], "0 to " + std::to_string(kMaxLoad));
    }
    total += load.data()[e];
  }
  if (total > kMaxTotalLoad)
    reject("sum of load", total, "at most " + std::to_string(kMaxTotalLoad));
  return topology;
}

// `make(scratch, slot_expert, slot_quota, home_quota)` makes the plan, without the interpreter.
template <class Make>
Arrays plan_unlocked(const Topology& topology, int64_t scratch_bytes, const Make& make) {
  const auto num_ranks = static_cast<size_t>(topology.num_ranks);
  const auto slots = static_cast<size_t>(topology.slots_per_rank);
  const auto num_experts = static_cast<size_t>(topology.num_experts);
  auto slot_expert = std::make_unique_for_overwrite<int32_t[]>(num_ranks * slots);
  auto slot_quota = std::make_unique_for_overwrite<int32_t[]>(num_ranks * slots);
  auto home_quota = std::make_unique_for_overwrite<int32_t[]>(num_experts);
  {
    const Unlocked unlocked;
    const auto scratch =
        std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(scratch_bytes));
    make(scratch.get(), slot_expert.get(), slot_quota.get(), home_quota.get());
  }
  return {to_numpy(std::move(slot_expert), {num_ranks, slots}),
          to_numpy(std::move(slot_quota), {num_ranks, slots}),
          to_numpy(std::move(home_quota), {num_experts})};
}

Arrays plan_replicas_numpy(const Input<int64_t, 1>& load, const Input<int32_t, 1>& home,
                           const Input<int32_t, 1>& domain, int32_t slots_per_rank,
                           bool allow_cross_domain, int64_t target_ppm,
                           const std::optional<Costs>& costs) {
  const Topology topology =
      checked_topology(load, home, domain, slots_per_rank, allow_cross_domain);
  const Objective objective = make_objective(target_ppm, costs);
  return plan_unlocked(
      topology, planner_scratch_bytes(topology),
      [&](std::byte* scratch, int32_t* slot_expert, int32_t* slot_quota, int32_t* home_quota) {
        plan_replicas(topology, load.data(), objective, PlannerScratch(topology, scratch),
                      slot_expert, slot_quota, home_quota);
      });
}

void check_residents(const Topology& topology, const Input<int32_t, 2>& residents) {
  require_equal("length of residents", residents.shape(0), topology.num_ranks);
  const PlanCheck check = check_plan(SingleThread{}, topology, residents.data());
  if (check.fault != PlanFault::kNone)
    reject("residents[" + std::to_string(check.rank) + ", " + std::to_string(check.slot) + "]",
           check.expert, "-1, or an expert that may be there, once on the rank");
}

Arrays plan_with_residents_numpy(const Input<int64_t, 1>& load, const Input<int32_t, 1>& home,
                                 const Input<int32_t, 1>& domain,
                                 const Input<int32_t, 2>& residents, bool allow_cross_domain,
                                 int64_t target_ppm) {
  const Topology topology = checked_topology(
      load, home, domain, static_cast<int32_t>(residents.shape(1)), allow_cross_domain);
  check_residents(topology, residents);
  const Objective objective = make_objective(target_ppm, std::nullopt);
  return plan_unlocked(
      topology, resident_scratch_bytes(topology),
      [&](std::byte* scratch, int32_t* slot_expert, int32_t* slot_quota, int32_t* home_quota) {
        plan_with_residents(topology, load.data(), residents.data(), objective.target_ppm, scratch,
                            slot_expert, slot_quota, home_quota);
      });
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
  m.def(
      "check_residents",
      [](const Input<int32_t, 1>& home, const Input<int32_t, 1>& domain,
         const Input<int32_t, 2>& residents, bool allow_cross_domain) {
        const Topology topology{.num_ranks = static_cast<int32_t>(domain.size()),
                                .num_experts = static_cast<int32_t>(home.size()),
                                .slots_per_rank = static_cast<int32_t>(residents.shape(1)),
                                .home = home.data(),
                                .domain = domain.data(),
                                .allow_cross_domain = allow_cross_domain};
        require_homes(topology);
        check_residents(topology, residents);
      },
      nb::arg("home").noconvert(), nb::arg("domain").noconvert(), nb::arg("residents").noconvert(),
      nb::arg("allow_cross_domain"));
  m.def("plan_with_residents", &plan_with_residents_numpy, nb::arg("load").noconvert(),
        nb::arg("home").noconvert(), nb::arg("domain").noconvert(),
        nb::arg("residents").noconvert(), nb::arg("allow_cross_domain"), nb::arg("target_ppm"),
        nb::sig("def plan_with_residents(load: ndarray[dtype=int64], home: ndarray[dtype=int32], "
                "domain: ndarray[dtype=int32], residents: ndarray[dtype=int32], "
                "allow_cross_domain: bool, target_ppm: int) -> "
                "tuple[ndarray[dtype=int32], ndarray[dtype=int32], ndarray[dtype=int32]]"),
        "Returns (slot_expert [G, S], slot_quota [G, S], home_quota [E]).");
}

}  // namespace uec::python
