// What the bindings of both engines share: addresses as arguments, questions about plans, and waits
// that Ctrl-C ends.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "core/digest.hpp"
#include "core/prepare_reduce.hpp"
#include "core/validate.hpp"
#include "host/health.hpp"

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

inline bool has_home(const Topology& t, uint64_t home) {
  return std::equal(t.home, t.home + t.num_experts, at<const int32_t>(home));
}

inline ReplicateArgs replicate_args(const Topology& t, uint64_t slot_expert, uint64_t slot_quota,
                                    uint64_t home_quota, uint64_t mains, uint64_t segments,
                                    int32_t num_segments, int32_t mode, int32_t region,
                                    uint64_t tag) {
  return {.slot_expert = at<const int32_t>(slot_expert),
          .plan_digest = digest_quotas(Alone{}, t, at<const int32_t>(slot_quota),
                                       at<const int32_t>(home_quota)),
          .tag = tag,
          .mains = at<const uint64_t>(mains),
          .segments = at<const int32_t>(segments),
          .num_segments = num_segments,
          .mode = mode,
          .region = region};
}

inline ReduceArgs reduce_args(const Topology& t, uint64_t slot_expert, uint64_t slot_quota,
                              uint64_t home_quota, uint64_t mains, uint64_t main_types,
                              int32_t mode, bool zero, uint64_t tag) {
  return {.slot_expert = at<const int32_t>(slot_expert),
          .plan_digest = digest_quotas(Alone{}, t, at<const int32_t>(slot_quota),
                                       at<const int32_t>(home_quota)),
          .tag = tag,
          .mains = at<const uint64_t>(mains),
          .main_type = at<const GradType>(main_types),
          .mode = mode,
          .zero = zero};
}

inline std::tuple<int64_t, int64_t, int64_t, int64_t> call_counts(const host::CallCounts& c) {
  return {c.replicate, c.reduce, c.gather, c.rejected};
}

template <class Engine>
void bind_plan_questions(nanobind::class_<Engine>& engine) {
  engine
      .def("check",
           [](const Engine& e, uint64_t slot_expert) {
             const PlanCheck c = e.check(at<const int32_t>(slot_expert));
             return std::make_tuple(static_cast<int>(c.fault), c.rank, c.slot, c.expert);
           })
      .def("accepts",
           [](const Engine& e, uint64_t slot_expert, uint64_t home) {
             return has_home(e.topology(), home) &&
                    e.check(at<const int32_t>(slot_expert)).fault == PlanFault::kNone;
           })
      .def("has_home", [](const Engine& e, uint64_t home) { return has_home(e.topology(), home); });
}

// Runs body(interrupted) without the interpreter lock.
template <class Body>
auto interruptible(Body&& body) {
  bool raised = false;
  const auto run = [&] {
    const nanobind::gil_scoped_release release;
    return body([&] { return raised = raised || signalled(); });
  };
  auto result = run();
  if (raised) throw nanobind::python_error();
  return result;
}

}  // namespace uec::python
