// Shared by the bindings of both engines: addresses as arguments, checks of plans, and waits that
// Ctrl-C interrupts.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "core/base/digest.hpp"
#include "core/plan/check.hpp"
#include "core/transfer/prepare.hpp"
#include "engine/config.hpp"
#include "modes.hpp"
#include "unlocked.hpp"

namespace uec::python {

// Addresses cross the boundary as integers: a tensor's data_ptr() costs a tenth of a conversion.
template <class T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

template <class T>
std::vector<T*> pointers(const std::vector<uint64_t>& addresses) {
  std::vector<T*> result;
  for (const uint64_t address : addresses) result.push_back(at<T>(address));
  return result;
}

// True once a Python signal handler has raised; the exception is then pending.
inline bool signalled() {
  const nanobind::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Addresses of a plan's tensors, and its shape.
struct PlanView {
  uint64_t slot_expert, slot_quota, home_quota, home;  // int32, [G][S] and [E]; 0: none
  int32_t num_ranks, slots_per_rank, num_experts;
  bool on_cpu;

  bool has_shape(const Topology& t) const {
    return num_ranks == t.num_ranks && slots_per_rank == t.slots_per_rank &&
           num_experts == t.num_experts;
  }

  // Whether the plan is on the CPU and has the group's shape and home map.
  bool fits(const Topology& t) const {
    return on_cpu && has_shape(t) &&
           std::equal(t.home, t.home + t.num_experts, at<const int32_t>(home));
  }
};

// The arguments of a transfer or a reduction.
struct TransferCall {
  Operation operation;
  PlanView plan;
  uint64_t main_ptrs;    // [segments][M] addresses of main weights or gradients
  int32_t num_segments;  // transfer: to move; reduction: with gradients
  GivenMode mode;
  bool background;
  uint64_t tag;         // layer and microbatch of the plan's handle; 0: no handle
  uint64_t segments;    // transfer: indices of the segments, int32, ascending
  int32_t region;       // transfer: the region of the main weights; -1: none
  uint64_t main_types;  // reduction: [segments] GradType
  bool zero;            // reduction: clear the slot gradients
  bool on_device;       // a kernel reads the plan
  bool own_home;        // the plan's home map is the group's own tensor
  uint64_t table;       // addresses in device memory, in place of `main_ptrs`; 0: none
  uint64_t in_use;      // reduction on the device: the saved plan's mark to clear; 0: none
  int32_t bank;         // the plan's; -1: none
  uint64_t version;     // transfer to a bank: of the main weights
  uint64_t known;       // transfer to a bank of a plan on the device: slot_expert on the CPU, or 0

  uint64_t plan_digest(const Topology& t) const {
    return digest_quotas(SingleThread{}, t, at<const int32_t>(plan.slot_quota),
                         at<const int32_t>(plan.home_quota));
  }

  ReplicateArgs replicate_args(const Topology& t) const {
    return {.slot_expert = at<const int32_t>(plan.slot_expert),
            .plan_digest = plan_digest(t),
            .tag = tag,
            .main_ptrs = at<const uint64_t>(main_ptrs),
            .segments = at<const int32_t>(segments),
            .num_segments = num_segments,
            .mode = number_of(mode),
            .region = region,
            .bank = {.index = bank, .version = version}};
  }

  ReduceArgs reduce_args(const Topology& t) const {
    return {.slot_expert = at<const int32_t>(plan.slot_expert),
            .slot_quota = at<const int32_t>(plan.slot_quota),
            .plan_digest = plan_digest(t),
            .tag = tag,
            .main_ptrs = at<const uint64_t>(main_ptrs),
            .main_type = at<const GradType>(main_types),
            .mode = number_of(mode),
            .zero = zero,
            .bank = bank};
  }
};

// int32 [G][S].
inline auto residents_array(const Topology& t, const std::vector<int32_t>& residents) {
  auto copy = std::make_unique_for_overwrite<int32_t[]>(residents.size());
  std::copy(residents.begin(), residents.end(), copy.get());
  return to_numpy(std::move(copy),
                  {static_cast<size_t>(t.num_ranks), static_cast<size_t>(t.slots_per_rank)});
}

// bool [G][S].
inline auto slots_to_fill_array(const Topology& t, const std::vector<uint8_t>& moves) {
  auto copy = std::make_unique_for_overwrite<bool[]>(moves.size());
  std::copy(moves.begin(), moves.end(), copy.get());
  return to_numpy(std::move(copy),
                  {static_cast<size_t>(t.num_ranks), static_cast<size_t>(t.slots_per_rank)});
}

// Whether a plan fits a group, and is legal there.
inline void bind_plan_questions(nanobind::class_<EngineConfig>& config) {
  constexpr auto check = [](const Topology& t, const PlanView& plan) {
    return check_plan(SingleThread{}, t, at<const int32_t>(plan.slot_expert));
  };
  config
      .def(
          "check_plan",
          [=](const EngineConfig& c, const PlanView& plan) {
            const PlanCheck found = check(c.topology(), plan);
            return std::make_tuple(found.fault, found.rank, found.slot, found.expert);
          },
          nanobind::arg("plan"))
      .def(
          "accepts",
          [=](const EngineConfig& c, const PlanView& plan) {
            const Topology t = c.topology();
            return plan.fits(t) && check(t, plan).fault == PlanFault::kNone;
          },
          nanobind::arg("plan"))
      .def(
          "fits",
          [](const EngineConfig& c, const PlanView& plan) { return plan.fits(c.topology()); },
          nanobind::arg("plan"))
      .def(
          "has_shape",
          [](const EngineConfig& c, const PlanView& plan) { return plan.has_shape(c.topology()); },
          nanobind::arg("plan"));
}

// Runs body(interrupted) without the interpreter lock.
template <class Body>
auto interruptible(Body&& body) {
  bool raised = false;
  const auto run = [&] {
    const Unlocked unlocked;
    return body([&] { return raised = raised || signalled(); });
  };
  auto result = run();
  if (raised) throw nanobind::python_error();
  return result;
}

}  // namespace uec::python
