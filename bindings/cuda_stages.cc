#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "calls.hpp"
#include "cuda/stages.hpp"
#include "objective.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uec::python {
namespace {

using cuda::Handle;
using cuda::PlanCall;
using cuda::RerouteCall;
using cuda::Routing;
using cuda::StageFaults;
using cuda::StageKernels;
using cuda::Stages;
using cuda::StageShape;

void bind_shape(nb::module_& m) {
  nb::class_<StageShape>(m, "CudaStageShape", "See src/cuda/stages.hpp.")
      .def(nb::init<int32_t, int32_t, std::vector<int32_t>, std::vector<int32_t>, bool, int32_t>(),
           nb::kw_only(), "rank"_a, "slots_per_rank"_a, "home"_a, "domain"_a,
           "allow_cross_domain"_a, "warp_size"_a)
      .def("plan_shared_bytes", &StageShape::plan_shared_bytes, "num_warps"_a)
      .def("bank_plan_shared_bytes", &StageShape::bank_plan_shared_bytes, "num_warps"_a)
      .def_prop_ro("shares_shared_bytes", &StageShape::shares_shared_bytes)
      .def_prop_ro("reroute_shared_bytes", &StageShape::reroute_shared_bytes)
      .def_prop_ro("constants_bytes", &StageShape::constants_bytes)
      .def("state_bytes", &StageShape::state_bytes, "max_runs"_a)
      .def("runs_of_ids", &StageShape::runs_of_ids, "num_ids"_a)
      .def("runs_of_map", &StageShape::runs_of_map, "num_tokens"_a);
}

void bind_faults(nb::module_& m) {
  nb::class_<StageFaults>(m, "CudaStageFaults",
                          "Faults found by launches: in a load, a reroute, a save.")
      .def_prop_ro("load", [](const StageFaults& f) { return cuda::PlanStatus::of(f.plan).fault; })
      .def_prop_ro("expert",
                   [](const StageFaults& f) { return cuda::PlanStatus::of(f.plan).expert; })
      .def_prop_ro("of_map",
                   [](const StageFaults& f) {
                     return f.reroute.routing == static_cast<uint64_t>(Routing::kMap);
                   })
      .def_prop_ro("reroute",
                   [](const StageFaults& f) {
                     return f.reroute.routing == 0 ? RerouteStatus{} : f.reroute.status;
                   })
      .def_prop_ro("saved_tag", [](const StageFaults& f) { return f.save.tag; })
      .def_prop_ro("saved_generation", [](const StageFaults& f) { return f.save.generation; });
}

}  // namespace

void bind_cuda_stages(nb::module_& m) {
  bind_shape(m);
  bind_faults(m);
  m.attr("CUDA_MAX_PLAN_WARPS") = cuda::kMaxPlanWarps;
  m.attr("CUDA_MAX_BANK_PLAN_WARPS") = cuda::kMaxBankPlanWarps;
  m.def("cuda_stage_faults_bytes", [] { return sizeof(StageFaults); });
  nb::class_<Stages>(m, "CudaStages", "Launches local stages of one rank; see src/cuda/stages.hpp.")
      .def(
          "__init__",
          [](Stages* self, const cuda::Driver& driver, uint64_t context, const StageShape& shape,
             uint64_t plan, uint64_t plan_in_bank, uint64_t shares, uint64_t reroute_int32,
             uint64_t reroute_int64, uint64_t reroute_map, uint64_t save_plan, int32_t plan_warps,
             int32_t bank_plan_warps, uint64_t constants, uint64_t faults, nb::object) {
            new (self) Stages(driver, at<void>(context), shape,
                              StageKernels{at<void>(plan), at<void>(plan_in_bank), at<void>(shares),
                                           at<void>(reroute_int32), at<void>(reroute_int64),
                                           at<void>(reroute_map), at<void>(save_plan)},
                              plan_warps, bank_plan_warps, constants, at<StageFaults>(faults));
          },
          // The stages use what `keep` owns, now and later, until they are destroyed.
          nb::kw_only(), "driver"_a, "context"_a, "shape"_a, "plan"_a, "plan_in_bank"_a, "shares"_a,
          "reroute_int32"_a, "reroute_int64"_a, "reroute_map"_a, "save_plan"_a, "plan_warps"_a,
          "bank_plan_warps"_a, "constants"_a, "faults"_a, "keep"_a, nb::keep_alive<1, 16>())
      .def("bind_state", &Stages::bind_state, "state"_a, "max_runs"_a)
      .def_prop_ro("max_runs", &Stages::max_runs)
      .def_prop_ro("counts",
                   [](const Stages& s) {
                     const cuda::LaunchCounts counts = s.counts();
                     return std::make_tuple(counts.kernels, counts.copies);
                   })
      .def(
          "plan",
          [](Stages& s, uint64_t load, uint64_t kept_load, uint64_t slot_expert,
             uint64_t slot_quota, uint64_t home_quota, int32_t num_sources, int64_t target_ppm,
             const std::optional<Costs>& costs, uint64_t bank, uint64_t moves, uint64_t stream) {
            s.plan(PlanCall{load, kept_load, slot_expert, slot_quota, home_quota, num_sources,
                            make_objective(target_ppm, costs), bank, moves},
                   at<void>(stream));
          },
          "load"_a, "kept_load"_a, "slot_expert"_a, "slot_quota"_a, "home_quota"_a, "num_sources"_a,
          "target_ppm"_a, "costs"_a.none(), "bank"_a, "moves"_a, "stream"_a)
      .def(
          "reroute",
          [](Stages& s, uint64_t load, uint64_t slot_expert, uint64_t slot_quota,
             uint64_t home_quota, uint64_t home, int32_t source, uint64_t ids, uint64_t out,
             int64_t num_ids, int32_t id_bytes, uint64_t stream) {
            s.reroute(RerouteCall{.load = load,
                                  .slot_expert = slot_expert,
                                  .slot_quota = slot_quota,
                                  .home_quota = home_quota,
                                  .home = home,
                                  .source = source,
                                  .routing = Routing::kIds,
                                  .from = ids,
                                  .to = out,
                                  .count = num_ids,
                                  .element_bytes = id_bytes},
                      at<void>(stream));
          },
          "load"_a, "slot_expert"_a, "slot_quota"_a, "home_quota"_a, "home"_a, "source"_a, "ids"_a,
          "out"_a, "num_ids"_a, "id_bytes"_a, "stream"_a)
      .def(
          "reroute_map",
          [](Stages& s, uint64_t load, uint64_t slot_expert, uint64_t slot_quota,
             uint64_t home_quota, uint64_t home, int32_t source, uint64_t map, uint64_t out,
             int64_t num_tokens, uint64_t probs, uint64_t physical_probs, int32_t prob_bytes,
             uint64_t instances, uint64_t stream) {
            s.reroute(RerouteCall{.load = load,
                                  .slot_expert = slot_expert,
                                  .slot_quota = slot_quota,
                                  .home_quota = home_quota,
                                  .home = home,
                                  .source = source,
                                  .routing = Routing::kMap,
                                  .from = map,
                                  .to = out,
                                  .count = num_tokens,
                                  .element_bytes = prob_bytes,
                                  .probs = probs,
                                  .physical_probs = physical_probs,
                                  .instances = instances},
                      at<void>(stream));
          },
          "load"_a, "slot_expert"_a, "slot_quota"_a, "home_quota"_a, "home"_a, "source"_a,
          "routing_map"_a, "out"_a, "num_tokens"_a, "probs"_a, "physical_probs"_a, "prob_bytes"_a,
          "instances"_a, "stream"_a)
      .def(
          "save_plan",
          [](Stages& s, const std::vector<std::tuple<uint64_t, uint64_t, int32_t>>& fields,
             uint64_t in_use, uint64_t generation, uint64_t tag, uint64_t stream) {
            if (fields.size() > cuda::SaveArgs::kMaxFields)
              throw std::invalid_argument("more fields than a plan has");
            cuda::SaveArgs args{.num_fields = static_cast<int32_t>(fields.size()),
                                .in_use = in_use,
                                .generation = generation,
                                .tag = tag};
            for (size_t i = 0; i < fields.size(); ++i)
              args.fields[i] = std::make_from_tuple<cuda::SavedField>(fields[i]);
            s.save_plan(args, at<void>(stream));
          },
          "fields"_a, "in_use"_a, "generation"_a, "tag"_a, "stream"_a,
          "Copies `fields` (to, from, words); generation 0: clears `in_use`.")
      .def(
          "is_capturing",
          [](const Stages& s, uint64_t stream) { return s.is_capturing(at<void>(stream)); },
          "stream"_a)
      .def_prop_ro("has_captured", &Stages::has_captured)
      .def("await_idle",
           [](const Stages& s) {
             return interruptible([&](auto&& interrupted) { return s.await_idle(interrupted); });
           })
      .def("take_faults", [](Stages& s) -> std::optional<StageFaults> {
        const StageFaults taken = s.take_faults();
        if (taken.plan == 0 && taken.reroute.routing == 0 && taken.save.tag == 0) return {};
        return taken;
      });
}

}  // namespace uec::python
