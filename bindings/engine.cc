#include "host/engine.hpp"

#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "calls.hpp"
#include "core/counts.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uec::python {
namespace {

using host::Engine;
using host::EngineConfig;
using host::EngineLayout;

bool wait(Engine& engine, uint64_t epoch) {
  return interruptible([&](auto&& interrupted) { return engine.wait(epoch, interrupted); });
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<EngineConfig>(m, "EngineConfig")
      .def(nb::init<>())
      .def_rw("rank", &EngineConfig::rank)
      .def_rw("num_experts", &EngineConfig::num_experts)
      .def_rw("slots_per_rank", &EngineConfig::slots_per_rank)
      .def_rw("home", &EngineConfig::home)
      .def_rw("domain", &EngineConfig::domain)
      .def_rw("allow_cross_domain", &EngineConfig::allow_cross_domain)
      .def_rw("segment_bytes", &EngineConfig::segment_bytes)
      .def("set_grads",
           [](EngineConfig& c, const std::vector<int64_t>& bytes, const std::vector<int>& types) {
             c.grad_bytes = bytes;
             c.grad_type.clear();
             for (const int type : types) c.grad_type.push_back(static_cast<GradType>(type));
           })
      .def_rw("tile_bytes", &EngineConfig::tile_bytes)
      .def_rw("num_workers", &EngineConfig::num_workers)
      .def_rw("call_timeout", &EngineConfig::call_timeout)
      .def_rw("wait_timeout", &EngineConfig::wait_timeout)
      .def_rw("peer_sockets", &EngineConfig::peer_sockets)
      .def_rw("peer_processes", &EngineConfig::peer_processes)
      .def("set_cost",
           [](EngineConfig& c, int64_t store_per_kib, int64_t load_per_kib, int64_t group,
              int64_t hop, int64_t parallel_percent) {
             c.cost = {store_per_kib, load_per_kib, group, hop, parallel_percent};
           })
      .def("set_bases", [](EngineConfig& c, const std::vector<uint64_t>& bases) {
        c.bases = pointers<uint8_t>(bases);
      });

  nb::class_<EngineLayout>(m, "EngineLayout")
      .def(nb::init<const EngineConfig&>())
      .def_prop_ro("total_bytes", [](const EngineLayout& l) { return l.symmetric.total; })
      .def_prop_ro("slots_base", [](const EngineLayout& l) { return l.symmetric.slots_base; })
      .def_ro("slot_offset", &EngineLayout::slot_offset)
      .def_ro("grad_offset", &EngineLayout::grad_offset)
      .def_ro("region_bytes", &EngineLayout::region_bytes)
      .def_ro("region_offset", &EngineLayout::region_offset)
      .def_ro("main_idx", &EngineLayout::main_idx)
      .def_ro("num_mains", &EngineLayout::num_mains)
      .def_ro("max_mains", &EngineLayout::max_mains);

  nb::class_<Report>(m, "Report")
      .def_prop_ro("fault", [](const Report& r) { return static_cast<int>(r.fault); })
      .def_prop_ro("flag", [](const Report& r) { return static_cast<int>(r.wait.flag); })
      .def_prop_ro("peer", [](const Report& r) { return r.wait.peer; })
      .def_prop_ro("expert", [](const Report& r) { return r.wait.expert; })
      .def_prop_ro("piece", [](const Report& r) { return r.wait.piece; })
      .def_prop_ro("seen", [](const Report& r) { return r.wait.seen; })
      .def_prop_ro("expected", [](const Report& r) { return r.wait.expected; })
      .def_ro("aborter", &Report::aborter)
      .def_ro("root", &Report::root)
      .def_ro("epoch", &Report::epoch)
      .def_ro("seconds", &Report::seconds)
      .def_ro("all_called", &Report::all_called);

  nb::class_<Engine> engine(m, "Engine");
  bind_plan_questions(engine);
  engine.def(nb::init<EngineConfig>())
      .def("add_region",
           [](Engine& e, const std::vector<uint64_t>& bases) {
             return e.add_region(pointers<const uint8_t>(bases));
           })
      .def("replicate",
           [](Engine& e, uint64_t slot_expert, uint64_t slot_quota, uint64_t home_quota,
              uint64_t mains, uint64_t segments, int32_t num_segments, int32_t mode, int32_t region,
              bool background, uint64_t tag) {
             const ReplicateArgs args =
                 replicate_args(e.topology(), slot_expert, slot_quota, home_quota, mains, segments,
                                num_segments, mode, region, tag);
             Mode chosen;
             const uint64_t epoch = interruptible([&](auto&& interrupted) {
               return e.replicate(args, background, &chosen, interrupted);
             });
             return std::make_pair(epoch, static_cast<int>(chosen));
           })
      .def("reduce",
           [](Engine& e, uint64_t slot_expert, uint64_t slot_quota, uint64_t home_quota,
              uint64_t mains, uint64_t main_types, int32_t mode, bool zero, bool background,
              uint64_t tag) {
             const ReduceArgs args = reduce_args(e.topology(), slot_expert, slot_quota, home_quota,
                                                 mains, main_types, mode, zero, tag);
             Mode chosen;
             const uint64_t epoch = interruptible([&](auto&& interrupted) {
               return e.reduce(args, background, &chosen, interrupted);
             });
             return std::make_pair(epoch, static_cast<int>(chosen));
           })
      .def("gather",
           [](Engine& e, uint64_t row, uint64_t table) {
             return interruptible([&](auto&& interrupted) {
               return e.gather(at<const int32_t>(row), at<int32_t>(table), false, interrupted);
             });
           })
      .def("reject",
           [](Engine& e) {
             interruptible([&](auto&& interrupted) {
               e.reject(interrupted);
               return true;
             });
           })
      .def("abort", &Engine::abort, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>())
      .def("wait", &wait)
      .def("synchronize", &wait)
      .def("is_completed", &Engine::is_completed)
      .def("finished_at", &Engine::finished_at)
      .def("failed_epoch", &Engine::failed_epoch)
      .def("report", &Engine::report)
      .def_prop_ro("epoch", &Engine::epoch)
      .def_prop_ro("bytes_stored", &Engine::bytes_stored);

  m.def("count_experts", [](uint64_t ids, int64_t num_ids, bool is_long, int32_t num_experts,
                            uint64_t counts) {
    return is_long
               ? count_experts(at<const int64_t>(ids), num_ids, num_experts, at<int32_t>(counts))
               : count_experts(at<const int32_t>(ids), num_ids, num_experts, at<int32_t>(counts));
  });
}

}  // namespace uec::python
