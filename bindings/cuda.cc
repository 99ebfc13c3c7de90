#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>
#include <utility>

#include "bind.hpp"
#include "calls.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/load_block.hpp"
#include "cuda/engine.hpp"
#include "cuda/stages.hpp"
#include "health.hpp"
#include "objective.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uec::python {
namespace {

using cuda::Driver;
using cuda::Engine;
using cuda::Handle;
using cuda::Launcher;
using cuda::LauncherConfig;
using cuda::PeerConfig;

Handle handle(uint64_t value) { return at<void>(value); }

Driver make_driver(const std::map<std::string, uint64_t>& addresses) {
  Driver driver;
#define UEC_TAKE(name, arguments)                                                                 \
  if (const auto found = addresses.find(#name); found == addresses.end() || found->second == 0) { \
    throw nb::value_error("the driver has no " #name);                                            \
  } else {                                                                                        \
    driver.name = reinterpret_cast<decltype(driver.name)>(found->second);                         \
  }
  UEC_DRIVER_FUNCTIONS(UEC_TAKE)
#undef UEC_TAKE
  return driver;
}

std::vector<std::string> driver_names() {
  return {
#define UEC_NAME(name, arguments) #name,
      UEC_DRIVER_FUNCTIONS(UEC_NAME)
#undef UEC_NAME
  };
}

Capacity largest_capacity(const EngineConfig& config) {
  const EngineLayout layout(config);
  Capacity capacity = layout.capacity(config);
  capacity.num_local_experts = layout.max_local_experts;
  return capacity;
}

// Bit i: whether a transfer moves segment i; for a reduction, the i-th main gradient's GradType.
uint32_t bits_of(const TransferCall& call) {
  const bool is_reduction = call.operation == Operation::kReduce;
  const auto* values = at<const int32_t>(is_reduction ? call.main_types : call.segments);
  uint32_t bits = 0;
  for (int32_t i = 0; i < call.num_segments; ++i) {
    bits |= is_reduction ? static_cast<uint32_t>(values[i]) << i : 1u << values[i];
  }
  return bits;
}

// Returns the call's epoch and mode; if the device chooses the mode, the requested one.
std::pair<uint64_t, GivenMode> transfer(Engine& e, const TransferCall& call, Handle stream,
                                        const cuda::Interrupted& interrupted) {
  if (!call.on_device) {
    Mode chosen;
    const uint64_t epoch = call.operation == Operation::kReduce
                               ? e.reduce(call.reduce_args(e.topology()), call.background, stream,
                                          interrupted, &chosen)
                               : e.replicate(call.replicate_args(e.topology()), call.background,
                                             stream, interrupted, &chosen);
    return {epoch, chosen};
  }
  const auto* main_ptrs = call.table == 0 ? at<const uint64_t>(call.main_ptrs) : nullptr;
  if (call.operation == Operation::kReduce) {
    const cuda::DeviceReduceArgs args{.slot_expert = call.plan.slot_expert,
                                      .slot_quota = call.plan.slot_quota,
                                      .home_quota = call.plan.home_quota,
                                      .home = call.own_home ? 0 : call.plan.home,
                                      .tag = call.tag,
                                      .main_ptrs = main_ptrs,
                                      .table = call.table,
                                      .main_types = bits_of(call),
                                      .mode = number_of(call.mode),
                                      .zero = call.zero,
                                      .bank = call.bank,
                                      .in_use = call.in_use};
    return {e.reduce_on_device(args, call.background, stream, interrupted), call.mode};
  }
  const cuda::DeviceReplicateArgs args{.slot_expert = call.plan.slot_expert,
                                       .slot_quota = call.plan.slot_quota,
                                       .home_quota = call.plan.home_quota,
                                       .home = call.own_home ? 0 : call.plan.home,
                                       .tag = call.tag,
                                       .main_ptrs = main_ptrs,
                                       .table = call.table,
                                       .segments = bits_of(call),
                                       .mode = number_of(call.mode),
                                       .region = call.region,
                                       .bank = call.bank,
                                       .version = call.version,
                                       .known = at<const int32_t>(call.known)};
  return {e.replicate_on_device(args, call.background, stream, interrupted), call.mode};
}

}  // namespace

void bind_cuda(nb::module_& m) {
  nb::exception<cuda::DriverError>(m, "DriverError", PyExc_RuntimeError);
  nb::exception<cuda::CaptureError>(m, "CaptureError", PyExc_RuntimeError);

  m.attr("CUDA_LAYOUT_HASH") = cuda::kLayoutHash;
  m.attr("CUDA_KERNELS_VERSION") = cuda::kVersion;
  m.attr("CUDA_MAX_DEVICE_SEGMENTS") = cuda::kMaxDeviceSegments;
  m.attr("CUDA_MAX_LAUNCH_RANKS") = cuda::kMaxLaunchRanks;
  m.attr("CUDA_CAPTURED") = cuda::kCaptured;
  m.def("cuda_tile_sizes",
        [] { return std::vector<int32_t>(std::begin(kTileSizes), std::end(kTileSizes)); });
  m.def(
      "cuda_shared_bytes",
      [](const EngineConfig& config, int64_t max_shared_bytes) {
        const Capacity capacity = largest_capacity(config);
        const int32_t workers =
            cuda::block_workers(capacity, config.tile_bytes, max_shared_bytes, 1);
        return cuda::shared_bytes(capacity, config.tile_bytes, workers);
      },
      "config"_a, "max_shared_bytes"_a);
  m.def(
      "cuda_reduce_shared_bytes",
      [](const EngineConfig& config) {
        return cuda::reduce_shared_bytes(largest_capacity(config));
      },
      "config"_a);
  m.def("cuda_load_shared_bytes", &cuda::load_shared_bytes, "num_ranks"_a, "num_experts"_a);
  m.def(
      "cuda_load_plan_shared_bytes",
      [](int32_t num_ranks, int32_t num_experts, int32_t slots_per_rank, int32_t num_warps) {
        Topology topology;
        topology.num_ranks = num_ranks;
        topology.num_experts = num_experts;
        topology.slots_per_rank = slots_per_rank;
        return cuda::load_plan_shared_bytes(topology, num_warps);
      },
      "num_ranks"_a, "num_experts"_a, "slots_per_rank"_a, "num_warps"_a);
  m.def(
      "cuda_plan_offsets",
      [](int32_t num_ranks, int32_t slots_per_rank, int32_t num_experts) {
        const auto at = cuda::PlanOutput::cut(0, num_ranks, slots_per_rank, num_experts);
        return std::make_tuple(at.slot_expert, at.slot_quota, at.home_quota, at.bytes);
      },
      "num_ranks"_a, "slots_per_rank"_a, "num_experts"_a,
      "Offsets of slot_expert, slot_quota and home_quota, and total bytes.");
  m.def("cuda_staging_bytes", &Engine::staging_bytes, "num_sms"_a, "tile_bytes"_a);
  m.def("cuda_driver_names", &driver_names);

  nb::class_<Driver>(m, "CudaDriver",
                     "Addresses of the driver's functions; ValueError: one is missing.")
      .def(
          "__init__",
          [](Driver* self, const std::map<std::string, uint64_t>& addresses) {
            new (self) Driver(make_driver(addresses));
          },
          "addresses"_a);

  nb::class_<LauncherConfig>(m, "CudaLauncherConfig", "See src/cuda/launcher.hpp.")
      .def(
          "__init__",
          [](LauncherConfig* self, const Driver& driver, uint64_t context, uint64_t stream,
             uint64_t captured_stream, uint64_t kernel, uint64_t reduce, uint64_t notice,
             uint64_t load, uint64_t load_plan, int32_t plan_warps, int32_t warp_size,
             int32_t first_rank, int32_t num_ranks, int32_t num_sms, int32_t background_sms,
             int64_t max_shared_bytes, const EngineConfig& config) {
            new (self) LauncherConfig{driver,
                                      handle(context),
                                      handle(stream),
                                      handle(captured_stream),
                                      handle(kernel),
                                      handle(reduce),
                                      handle(notice),
                                      handle(load),
                                      handle(load_plan),
                                      plan_warps,
                                      warp_size,
                                      first_rank,
                                      num_ranks,
                                      num_sms,
                                      background_sms,
                                      config.tile_bytes,
                                      max_shared_bytes,
                                      largest_capacity(config),
                                      0,
                                      nullptr,
                                      config.call_timeout};
          },
          nb::kw_only(), "driver"_a, "context"_a, "stream"_a, "captured_stream"_a, "kernel"_a,
          "reduce"_a, "notice"_a, "load"_a, "load_plan"_a, "plan_warps"_a, "warp_size"_a,
          "first_rank"_a, "num_ranks"_a, "num_sms"_a, "background_sms"_a, "max_shared_bytes"_a,
          "config"_a)
      .def_prop_ro("device_bytes", &Launcher::device_bytes)
      .def_prop_ro("pinned_bytes", &Launcher::pinned_bytes)
      .def("blocks_per_multiprocessor", &Launcher::blocks_per_multiprocessor);

  nb::class_<Launcher>(m, "CudaLauncher",
                       "Launches calls of the ranks that share it; `keep` owns its memory.")
      .def(
          "__init__",
          [](Launcher* self, LauncherConfig config, uint64_t device, uint64_t pinned, nb::object) {
            config.device = device;
            config.pinned = at<uint8_t>(pinned);
            new (self) Launcher(config);
          },
          // The last engine to release the launcher still uses what `keep` owns.
          "config"_a, "device"_a, "pinned"_a, "keep"_a, nb::keep_alive<1, 5>())
      .def_prop_ro("counts", [](const Launcher& l) {
        const cuda::LaunchCounts counts = l.counts();
        return std::make_tuple(counts.kernels, counts.copies);
      });

  nb::class_<Engine>(m, "CudaEngine", "One rank's CUDA engine; see src/cuda/engine.hpp.")
      .def(
          "__init__",
          [](Engine* self, const EngineConfig& config, std::shared_ptr<Launcher> launcher,
             std::vector<uint8_t> far, std::vector<int32_t> pes, uint64_t staging) {
            new (self) Engine(config, PeerConfig{std::move(far), std::move(pes), staging},
                              std::move(launcher));
          },
          "config"_a, "launcher"_a, nb::kw_only(), "far"_a, "pes"_a, "staging"_a)
      .def("add_region", &Engine::add_region, "bases"_a, "offset"_a, "table"_a,
           nb::call_guard<Unlocked>())
      .def(
          "transfer",
          [](Engine& e, const TransferCall& call, uint64_t stream) {
            return interruptible(
                [&](auto&& interrupted) { return transfer(e, call, handle(stream), interrupted); });
          },
          "call"_a, "stream"_a)
      .def(
          "gather",
          [](Engine& e, uint64_t ids, int64_t count, int32_t id_bytes, uint64_t load,
             uint64_t stream) {
            return interruptible([&](auto&& interrupted) {
              return e.gather({ids, count, load, id_bytes}, 0, {}, handle(stream), interrupted);
            });
          },
          "ids"_a, "count"_a, "id_bytes"_a, "load"_a, "stream"_a)
      .def(
          "gather_and_plan",
          [](Engine& e, uint64_t ids, int64_t count, int32_t id_bytes, uint64_t load, uint64_t plan,
             const cuda::Stages& stages, int64_t target_ppm, const std::optional<Costs>& costs,
             uint64_t stream) {
            const cuda::PlanArgs args = stages.plan_args(make_objective(target_ppm, costs));
            return interruptible([&](auto&& interrupted) {
              return e.gather({ids, count, load, id_bytes}, plan, args, handle(stream),
                              interrupted);
            });
          },
          "ids"_a, "count"_a, "id_bytes"_a, "load"_a, "plan"_a, "stages"_a, "target_ppm"_a,
          "costs"_a.none(), "stream"_a)
      .def(
          "residents",
          [](Engine& e, int32_t bank, uint64_t stream) {
            return residents_array(e.topology(), interruptible([&](auto&& interrupted) {
                                     return e.residents(bank, handle(stream), interrupted);
                                   }));
          },
          "bank"_a, "stream"_a)
      .def(
          "bank_table",
          [](Engine& e, int32_t bank, uint64_t stream) {
            return interruptible([&](auto&& interrupted) {
              return e.bank_table(bank, handle(stream), interrupted);
            });
          },
          "bank"_a, "stream"_a)
      .def("version", &Engine::version, "bank"_a, nb::call_guard<Unlocked>())
      .def("ready", &Engine::ready, "bank"_a)
      .def(
          "wait_slots",
          [](Engine& e, uint64_t epoch, const std::vector<int32_t>& slots, uint64_t stream) {
            return interruptible([&](auto&& interrupted) {
              return e.wait_slots(epoch, slots, handle(stream), interrupted);
            });
          },
          "epoch"_a, "slots"_a, "stream"_a)
      .def(
          "invalidate",
          [](Engine& e, int32_t bank, uint64_t stream) {
            interruptible([&](auto&& interrupted) {
              e.invalidate(bank, handle(stream), interrupted);
              return true;
            });
          },
          "bank"_a, "stream"_a)
      .def("reject", &Engine::reject, nb::call_guard<Unlocked>())
      .def("abort", &Engine::abort, nb::call_guard<Unlocked>())
      .def("close", &Engine::close, nb::call_guard<Unlocked>())
      .def(
          "wait",
          [](Engine& e, uint64_t epoch, uint64_t stream) {
            return interruptible(
                [&](auto&& interrupted) { return e.wait(epoch, handle(stream), interrupted); });
          },
          "epoch"_a, "stream"_a)
      .def(
          "synchronize",
          [](Engine& e, uint64_t epoch) {
            return interruptible(
                [&](auto&& interrupted) { return e.synchronize(epoch, interrupted); });
          },
          "epoch"_a)
      .def("is_completed", &Engine::is_completed, "epoch"_a)
      .def("failed_epoch", &Engine::failed_epoch)
      .def(
          "report",
          [](const Engine& e) {
            FullReport full{e.report()};
            full.bad_id = e.bad_id();
            full.peers = peer_states(e.peer_states(), full.epoch);
            return full;
          },
          nb::call_guard<Unlocked>())
      .def_prop_ro("epoch", &Engine::epoch)
      .def_prop_ro("bytes_stored", &Engine::bytes_stored)
      .def(
          "health", [](const Engine& e, bool) { return EngineHealth{e.calls(), {}, {}, {}}; },
          "waits"_a);
}

}  // namespace uec::python
