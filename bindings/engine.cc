#include "host/engine.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "calls.hpp"
#include "core/plan/counts.hpp"
#include "health.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uec::python {
namespace {

using host::Engine;

FullReport report(const Engine& engine) {
  FullReport full{engine.report()};
  full.damage = engine.damage();
  full.peers = peer_states(engine.peer_states(), engine.epoch());
  return full;
}

bool wait(Engine& engine, uint64_t epoch) {
  return interruptible([&](auto&& interrupted) { return engine.wait(epoch, interrupted); });
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<EngineConfig> config(m, "EngineConfig", "See src/engine/config.hpp.");
  config
      .def(
          "__init__",
          [](EngineConfig* self, int32_t rank, int32_t num_experts, int32_t slots_per_rank,
             std::vector<int32_t> home, std::vector<int32_t> domain, bool allow_cross_domain,
             std::vector<int64_t> segment_bytes, std::vector<int64_t> grad_bytes,
             std::vector<GradType> grad_type, int64_t tile_bytes,
             const std::array<int64_t, 5>& cost, double call_timeout, double wait_timeout,
             int32_t num_banks, int32_t num_grad_banks, int64_t instance_align) {
            new (self) EngineConfig{.rank = rank,
                                    .num_experts = num_experts,
                                    .slots_per_rank = slots_per_rank,
                                    .home = std::move(home),
                                    .domain = std::move(domain),
                                    .allow_cross_domain = allow_cross_domain,
                                    .segment_bytes = std::move(segment_bytes),
                                    .grad_bytes = std::move(grad_bytes),
                                    .grad_type = std::move(grad_type),
                                    .num_banks = num_banks,
                                    .num_grad_banks = num_grad_banks,
                                    .instance_align = instance_align,
                                    .tile_bytes = tile_bytes,
                                    .call_timeout = call_timeout,
                                    .wait_timeout = wait_timeout,
                                    .cost = {cost[0], cost[1], cost[2], cost[3], cost[4]}};
          },
          nb::kw_only(), "rank"_a, "num_experts"_a, "slots_per_rank"_a, "home"_a, "domain"_a,
          "allow_cross_domain"_a, "segment_bytes"_a, "grad_bytes"_a, "grad_type"_a, "tile_bytes"_a,
          "cost"_a, "call_timeout"_a, "wait_timeout"_a, "num_banks"_a = 1, "num_grad_banks"_a = 1,
          "instance_align"_a = 0)
      .def_prop_ro("num_ranks", [](const EngineConfig& c) { return c.domain.size(); })
      .def_ro("num_experts", &EngineConfig::num_experts)
      .def_ro("slots_per_rank", &EngineConfig::slots_per_rank)
      .def_ro("num_banks", &EngineConfig::num_banks)
      .def_ro("num_grad_banks", &EngineConfig::num_grad_banks)
      .def_rw("tile_bytes", &EngineConfig::tile_bytes)
      .def_rw("num_workers", &EngineConfig::num_workers)
      .def(
          "set_memory",
          [](EngineConfig& c, const std::vector<uint64_t>& bases,
             const std::vector<uint64_t>& check_bases) {
            c.bases = pointers<uint8_t>(bases);
            c.check_bases = pointers<uint8_t>(check_bases);
          },
          "bases"_a, "check_bases"_a)
      .def(
          "set_peers",
          [](EngineConfig& c, std::vector<int> pipes, std::vector<int> processes) {
            c.peer_pipes = std::move(pipes);
            c.peer_processes = std::move(processes);
          },
          "pipes"_a, "processes"_a);
  bind_plan_questions(config);

  nb::class_<EngineLayout>(m, "EngineLayout", "Offsets in bytes, the same on every rank.")
      .def(nb::init<const EngineConfig&>(), "config"_a)
      .def_prop_ro("total_bytes", [](const EngineLayout& l) { return l.symmetric.total; })
      .def_prop_ro("slots_base", [](const EngineLayout& l) { return l.symmetric.slots_base; })
      .def_prop_ro("check_bytes", [](const EngineLayout& l) { return l.check.total; })
      .def_ro("slot_offset", &EngineLayout::slot_offset)
      .def_ro("grad_offset", &EngineLayout::grad_offset)
      .def_ro("region_bytes", &EngineLayout::region_bytes)
      .def_ro("region_offset", &EngineLayout::region_offset)
      .def_ro("instance_align", &EngineLayout::instance_align)
      .def_ro("instance_bytes", &EngineLayout::instance_bytes)
      .def_ro("instance_offset", &EngineLayout::instance_offset)
      .def_ro("grad_instance_bytes", &EngineLayout::grad_instance_bytes)
      .def_ro("grad_instance_offset", &EngineLayout::grad_instance_offset)
      .def_ro("local_idx", &EngineLayout::local_idx)
      .def_ro("num_local_experts", &EngineLayout::num_local_experts)
      .def_ro("max_local_experts", &EngineLayout::max_local_experts);

  nb::class_<PlanView>(m, "PlanView", "Addresses of a plan's tensors, and its shape.")
      .def(nb::init<uint64_t, uint64_t, uint64_t, uint64_t, int32_t, int32_t, int32_t, bool>(),
           "slot_expert"_a, "slot_quota"_a, "home_quota"_a, "home"_a, "num_ranks"_a,
           "slots_per_rank"_a, "num_experts"_a, "on_cpu"_a);

  nb::class_<TransferCall>(m, "TransferCall",
                           "Arguments of an engine's transfer; see bindings/calls.hpp.")
      .def(nb::init<Operation, PlanView, uint64_t, int32_t, GivenMode, bool, uint64_t, uint64_t,
                    int32_t, uint64_t, bool, bool, bool, uint64_t, uint64_t, int32_t, uint64_t,
                    uint64_t>(),
           "operation"_a, "plan"_a, "main_ptrs"_a, "num_segments"_a, "mode"_a.none(),
           "background"_a, "tag"_a, nb::kw_only(), "segments"_a = 0, "region"_a = -1,
           "main_types"_a = 0, "zero"_a = false, "on_device"_a = false, "own_home"_a = false,
           "table"_a = 0, "in_use"_a = 0, "bank"_a = -1, "version"_a = 0, "known"_a = 0)
      .def_ro("bank", &TransferCall::bank)
      .def_ro("zero", &TransferCall::zero);

  nb::class_<Engine>(m, "Engine", "One rank's host engine; see src/host/engine.hpp.")
      .def(nb::init<EngineConfig>(), "config"_a)
      .def(
          "add_region",
          [](Engine& e, const std::vector<uint64_t>& bases, std::vector<int64_t> offset) {
            return e.add_region({pointers<const uint8_t>(bases), std::move(offset)});
          },
          "bases"_a, "offset"_a)
      .def(
          "transfer",
          [](Engine& e, const TransferCall& call, nb::handle) {
            Mode chosen;
            const uint64_t epoch = interruptible([&](auto&& interrupted) {
              return call.operation == Operation::kReduce
                         ? e.reduce(call.reduce_args(e.topology()), call.background, &chosen,
                                    interrupted)
                         : e.replicate(call.replicate_args(e.topology()), call.background, &chosen,
                                       interrupted);
            });
            return std::make_pair(epoch, chosen);
          },
          "call"_a, "bound"_a.none() = nb::none())
      .def(
          "exchange",
          [](Engine& e, uint64_t row, uint64_t table) {
            return interruptible([&](auto&& interrupted) {
              return e.gather(at<const int32_t>(row), at<int32_t>(table), false, interrupted);
            });
          },
          "row"_a, "table"_a)
      .def(
          "residents",
          [](const Engine& e, int32_t bank) {
            std::vector<int32_t> residents;
            {
              const Unlocked unlocked;  // a call may hold the engine's lock, and ask for signals
              residents = e.residents(bank);
            }
            return residents_array(e.topology(), residents);
          },
          "bank"_a)
      .def("version", &Engine::version, "bank"_a, nb::call_guard<Unlocked>())
      .def("last_call", &Engine::last_call, "bank"_a, nb::call_guard<Unlocked>())
      .def("invalidate", &Engine::invalidate, "bank"_a, nb::call_guard<Unlocked>())
      .def("slots_to_fill",
           [](const Engine& e) { return slots_to_fill_array(e.topology(), e.slots_to_fill()); })
      .def("reject",
           [](Engine& e) {
             interruptible([&](auto&& interrupted) {
               e.reject(interrupted);
               return true;
             });
           })
      .def("abort", &Engine::abort, nb::call_guard<Unlocked>())
      .def("close", &Engine::close, nb::call_guard<Unlocked>())
      .def("wait", &wait, "epoch"_a)
      .def("synchronize", &wait, "epoch"_a)
      .def("slot_ready", &Engine::slot_ready, "epoch"_a, "slot"_a)
      .def(
          "wait_slots",
          [](Engine& e, uint64_t epoch, const std::vector<int32_t>& slots) {
            return interruptible(
                [&](auto&& interrupted) { return e.wait_slots(epoch, slots, interrupted); });
          },
          "epoch"_a, "slots"_a)
      .def("is_completed", &Engine::is_completed, "epoch"_a)
      .def("finished_at", &Engine::finished_at, "epoch"_a)
      .def("failed_epoch", &Engine::failed_epoch)
      .def("report", &report)
      .def_prop_ro("epoch", &Engine::epoch)
      .def_prop_ro("bytes_stored", &Engine::bytes_stored)
      .def(
          "health",
          [](const Engine& e, bool waits) {
            EngineHealth health{e.calls(), e.completed(), e.bytes_stored(), {}};
            if (waits) health.waits = e.waits();
            return health;
          },
          "waits"_a);

  m.def(
      "count_experts",
      [](uint64_t ids, int64_t num_ids, bool is_long, int32_t num_experts, uint64_t counts) {
        return is_long ? count_experts(at<const int64_t>(ids), num_ids, num_experts,
                                       at<int32_t>(counts))
                       : count_experts(at<const int32_t>(ids), num_ids, num_experts,
                                       at<int32_t>(counts));
      },
      "ids"_a, "num_ids"_a, "is_long"_a, "num_experts"_a, "counts"_a,
      "Returns the position of the first bad id, or -1.");
}

}  // namespace uec::python
