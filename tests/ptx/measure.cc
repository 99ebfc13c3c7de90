// What the compiled kernels cost on the PTX machine: one JSON object a line, for each measurement
// that is named on the command line. measure.py says which there are.
#include <cstdio>
#include <string>
#include <vector>

#include "device/emulated_gradients.hpp"
#include "device/emulated_load.hpp"
#include "device/emulated_plan.hpp"
#include "device/emulated_reroute.hpp"

namespace {

using namespace device_tests;

void report(const std::string& name, const std::vector<int32_t>& slot_expert = {}) {
  std::string plan;
  for (const int32_t e : slot_expert) plan += (plan.empty() ? "" : ", ") + std::to_string(e);
  std::printf("{\"measurement\": \"%s\", \"slot_expert\": [%s], %s\n", name.c_str(), plan.c_str(),
              ptx_machine::Client::instance()->report() + 1);
}

// The numbers behind a name: "push:2,4096,64,0".
class Numbers {
 public:
  explicit Numbers(const std::string& text) {
    for (size_t at = text.find(':'); at != std::string::npos; at = text.find(',', at + 1))
      numbers_.push_back(std::stoi(text.substr(at + 1)));
  }
  int32_t next() {
    if (next_ == numbers_.size()) {
      std::fprintf(stderr, "too few numbers\n");
      std::exit(2);
    }
    return numbers_[next_++];
  }

 private:
  std::vector<int32_t> numbers_;
  size_t next_ = 0;
};

std::vector<int32_t> zipf(int32_t num_experts, int32_t num_sources) {
  Random random(1);
  std::vector<int32_t> load(num_sources * num_experts);
  for (int32_t e = 0; e < num_experts; ++e)
    for (int32_t s = 0; s < num_sources; ++s)
      load[s * num_experts + e] =
          (100000 / (1 + (e * 37 + 11) % num_experts) + draw(random, 0, 200)) / num_sources;
  return load;
}

Options options_of(const std::vector<int64_t>& segments, int32_t blocks, Plans plans,
                   int64_t tile_bytes = kTile) {
  Options options;
  options.segment_bytes = segments;
  options.max_blocks = blocks;
  options.tile_bytes = tile_bytes;
  options.block_workers = most_workers(tile_bytes, blocks);
  options.plans = plans;
  return options;
}

// ranks, blocks, whether the plan is on the device: a call that moves nothing.
void empty(Numbers of, const std::string& name) {
  const int32_t ranks = of.next(), blocks = of.next();
  const Plans plans = of.next() != 0 ? Plans::kOnDevice : Plans::kOnHost;
  EmulatedGroup group(make_group(ranks, ranks * 4, 2), options_of({4096, 4096}, blocks, plans));
  for (int call = 0; call < 2; ++call) {
    group.prepare(Mode::kPush, {0, 1});
    group.launch(blocks);
    group.check_success();
  }
  report(name);
}

// ranks, experts, KiB, blocks, KiB of a tile, whether the plan is on the device, mode: what a
// skewed load asks for.
void planned(Numbers of, const std::string& name) {
  const int32_t ranks = of.next(), experts = of.next();
  const int64_t bytes = int64_t{of.next()} << 10;
  const int32_t blocks = of.next();
  const int64_t tile_bytes = int64_t{of.next()} << 10;
  const Plans plans = of.next() != 0 ? Plans::kOnDevice : Plans::kOnHost;
  PlanCase group = make_group(ranks, experts, 2);
  group.slot_expert =
      plan_on_host(group.topology(), sums(zipf(experts, 1), experts), uec::Objective{}).slot_expert;
  EmulatedGroup all(group, options_of({bytes / 3 * 2, bytes / 3}, blocks, plans, tile_bytes));
  all.prepare(static_cast<Mode>(of.next()), {0, 1});
  all.launch(blocks);
  all.check_success();
  report(name, group.slot_expert);
}

// ranks, experts, slots, warps: a plan.
void plan(Numbers of, const std::string& name) {
  const int32_t ranks = of.next(), experts = of.next(), slots = of.next(), warps = of.next();
  const PlanCase group = make_group(ranks, experts, slots);
  uint64_t fault = 0;
  const auto* const machine = ptx_machine::Client::instance();
  machine->forget();
  machine->memory(&fault, sizeof fault, -1);
  const std::vector<int32_t> load = zipf(experts, 1);
  const Plan found = plan_on_device(group.topology(), load, {}, warps, &fault, false);
  CHECK(found == plan_on_host(group.topology(), sums(load, experts), {}));
  report(name);
}

// The same on top of what slots hold for a load that was up to a quarter more or less.
void plan_in_bank(Numbers of, const std::string& name) {
  const int32_t ranks = of.next(), experts = of.next(), slots = of.next(), warps = of.next();
  const PlanCase group = make_group(ranks, experts, slots);
  const uec::Topology topology = group.topology();
  uint64_t fault = 0;
  std::vector<int32_t> load = zipf(experts, 1);
  std::vector<int32_t> held = plan_on_host(topology, sums(load, experts), {}).slot_expert;
  Random random(1);
  for (int32_t& tokens : load)
    tokens = static_cast<int32_t>(int64_t{tokens} * draw(random, 75, 125) / 100);
  const uec::BankTable bank{.version = 1, .segments = 1, .resident = held.data()};
  const auto* const machine = ptx_machine::Client::instance();
  machine->forget();
  machine->memory(&fault, sizeof fault, -1);
  std::vector<uint8_t> moves;
  const Plan found = plan_in_bank_on_device(topology, load, bank, 1'010'000, warps, &fault, &moves);
  CHECK(found == plan_in_bank_on_host(topology, sums(load, experts), held, 1'010'000));
  report(name);
}

// The ids of a rank, each expert's as a skewed load has them, and some padding.
std::vector<int64_t> skewed_ids(Random& random, int32_t num_experts, int32_t count) {
  std::vector<int64_t> ids(count);
  for (int64_t& id : ids) {
    const int32_t a = draw(random, -1, num_experts - 1), b = draw(random, 0, num_experts - 1);
    id = std::min(a, b);
  }
  return ids;
}

// ranks, experts, ids of the first rank, of each other one, bytes of an id: from ids to the table
// of loads.
void load(Numbers of, const std::string& name) {
  const int32_t ranks = of.next(), experts = of.next(), most = of.next(), other = of.next();
  const int32_t id_bytes = of.next();
  EmulatedGroup group(make_group(ranks, experts, 1), options_of({64}, 1, Plans::kOnHost));
  EmulatedLoad loads(group);
  Random random(1);
  loads.draw(random, 0);
  for (int32_t r = 0; r < ranks; ++r)
    loads.give(r, skewed_ids(random, experts, r == 0 ? most : other), id_bytes, 0);
  const auto grid = uec::cuda::LoadGrid::of(ranks, experts, most, uec::cuda::kMaxLoadBlocks);
  loads.launch({grid.num_blocks, grid.num_threads / 32});
  loads.check_success();
  report(name);
}

// ranks, experts, slots, ids of the source, whether only the shares: 8-byte ids to those of
// instances.
void reroute(Numbers of, const std::string& name) {
  const int32_t ranks = of.next(), experts = of.next(), slots = of.next(), count = of.next();
  Random random(1);
  RoutingCase c = draw_group(random, ranks, experts, slots);
  c.source = ranks - 1;  // whose turn is the last
  const std::vector<int64_t> ids = skewed_ids(random, experts, count);
  for (int32_t r = 0; r < ranks; ++r) {
    c.load.resize((r + 1) * experts);
    const std::vector<int64_t> of_rank = r == c.source ? ids : skewed_ids(random, experts, count);
    CHECK_EQ(uec::count_experts(of_rank.data(), count, experts, c.load.data() + r * experts), -1);
  }
  const Plan plan = plan_on_host(c.group.topology(), sums(c.load, experts), {});
  c.group.slot_expert = plan.slot_expert;
  c.slot_quota = plan.slot_quota;
  c.home_quota = plan.home_quota;
  EmulatedReroute device(c, count, 0, uec::cuda::kWindowLog2);
  std::vector<int64_t> out(count), expected(count);
  device.share();
  if (of.next() != 0) return report(name);
  device.reroute(ids.data(), count, out.data());
  const HostShares host(c);
  check_equal(uec::reroute_tokens(ids.data(), count, experts, host.scratch, expected.data()), {});
  CHECK(out == expected);
  report(name);
}

// replicas, KiB, blocks, KiB of a tile, mode: one expert of rank 0.
void fan_out(Numbers of, const std::string& name) {
  const int32_t replicas = of.next();
  const int64_t bytes = int64_t{of.next()} << 10;
  const int32_t blocks = of.next();
  const int64_t tile_bytes = int64_t{of.next()} << 10;
  PlanCase group = make_group(replicas + 1, replicas + 1, 1);
  for (int32_t r = 1; r <= replicas; ++r) CHECK(group.place(0, r));
  EmulatedGroup all(group, options_of({bytes}, blocks, Plans::kOnHost, tile_bytes));
  all.prepare(static_cast<Mode>(of.next()), {0});
  all.launch(blocks);
  all.check_success();
  report(name, group.slot_expert);
}

// replicas, KiB of a replica's fp32 gradients, blocks, adding warps, mode: one expert of rank 0, in
// tiles of 32 KiB.
void reduce(Numbers of, const std::string& name) {
  const int32_t replicas = of.next();
  const int64_t bytes = int64_t{of.next()} << 10;
  const int32_t blocks = of.next(), warps = of.next();
  PlanCase group = make_group(replicas + 1, replicas + 1, 1);
  for (int32_t r = 1; r <= replicas; ++r) CHECK(group.place(0, r));
  Options options = options_of({64}, blocks, Plans::kOnHost, 2 * kTile);
  options.grad_bytes = {bytes};
  options.grad_type = {uec::GradType::kFloat32};
  EmulatedGradients all(group, options, {uec::GradType::kFloat32}, 0);
  all.adding_warps = warps;
  all.prepare_sums({of.next(), true});
  all.launch(blocks);
  all.check_success();
  report(name);
}

}  // namespace

int main(int argc, char** argv) {
  if (ptx_machine::Client::instance() == nullptr) {
    std::fprintf(stderr, "UEC_PTX_MACHINE has to name the PTX machine's library\n");
    return 2;
  }
  const std::pair<const char*, void (*)(Numbers, const std::string&)> known[] = {
      {"empty", empty}, {"planned", planned}, {"plan", plan},       {"plan_in_bank", plan_in_bank},
      {"load", load},   {"reroute", reroute}, {"fan_out", fan_out}, {"reduce", reduce}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    bool found = false;
    for (const auto& [kind, measure] : known)
      if (name.starts_with(std::string(kind) + ":")) {
        measure(Numbers(name), name);
        found = true;
      }
    if (!found) {
      std::fprintf(stderr, "no measurement: %s\n", name.c_str());
      return 2;
    }
    std::fflush(stdout);
  }
}
