// A loopback group on the emulated device: its memory, its calls, and a check of every byte.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/transfer/prepare.hpp"
#include "cuda/device/notice.cuh"
#include "cuda/device/replicate.cuh"
#include "cuda/rank_state.hpp"
#include "engine/cause.hpp"
#include "engine/config.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace device_tests {

inline constexpr int64_t kTile = 16 << 10;  // or twice that

// The most workers of a rank's block, on a device with shared memory for them.
inline int32_t most_workers(int64_t tile_bytes, int32_t num_blocks = 1) {
  return uec::cuda::block_workers({}, tile_bytes, 1 << 20, num_blocks);
}

using uec::Fault;
using uec::Mode;
using uec::cuda::Notice;
using uec::cuda::RankState;
using uec::cuda::Status;

// Bytes that an aligned address begins, or one that is `skew` off.
class Buffer {
 public:
  explicit Buffer(int64_t bytes, int64_t skew = 0)
      : storage_((bytes + skew) / 128 + 2), skew_(skew) {}
  uint8_t* data() { return storage_[0].bytes + skew_; }

 private:
  struct alignas(128) Line {
    uint8_t bytes[128] = {};
  };
  std::vector<Line> storage_;
  int64_t skew_;
};

inline uint8_t payload(uint64_t call, int32_t expert, int32_t segment, int64_t at) {
  uint64_t x = call * 0x9E3779B97F4A7C15ull +
               static_cast<uint64_t>(expert) * 0xD6E8FEB86659FD93ull +
               static_cast<uint64_t>(segment) * 77 + static_cast<uint64_t>(at) / 8;
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ull;
  return static_cast<uint8_t>(x >> (8 * (at % 8)));
}

// With a plan on the device the kernel makes the call's block.
enum class Plans { kOnHost, kOnDevice, kMixed };

struct Options {
  std::vector<int64_t> segment_bytes;
  int64_t skew = 0;  // of the main weights' addresses
  bool far = false;  // ranks of different domains have no load/store access
  double call_timeout = 60, wait_timeout = 60;
  Plans plans = Plans::kOnHost;
  std::vector<int64_t> grad_bytes{};  // of slot gradients
  std::vector<uec::GradType> grad_type{};
  int64_t tile_bytes = kTile;
  int32_t max_blocks = 4;
  int32_t block_workers = 1;
  int32_t num_banks = 1;
  int32_t num_grad_banks = 1;
  int64_t instance_align = 0;
};

class EmulatedGroup {
 public:
  EmulatedGroup(const PlanCase& group, const Options& options)
      : group_(group),
        options_(options),
        states_(group.num_ranks),
        statuses_(group.num_ranks),
        device_(group.num_ranks),
        plans_(group.num_ranks),
        tables_(group.num_ranks),
        rank_tables_(group.num_ranks),
        rank_banks_(group.num_ranks),
        table_memory_(group.num_ranks) {
    const int32_t ranks = group.num_ranks;
    const auto segments = static_cast<int32_t>(options.segment_bytes.size());
    for (int32_t r = 0; r < ranks; ++r) {
      uec::EngineConfig config;
      config.rank = r;
      config.num_experts = group.num_experts;
      config.slots_per_rank = group.slots_per_rank;
      config.home = group.home;
      config.domain = group.domain;
      config.allow_cross_domain = group.allow_cross_domain;
      config.segment_bytes = options.segment_bytes;
      config.grad_bytes = options.grad_bytes;
      config.grad_type = options.grad_type;
      config.tile_bytes = options.tile_bytes;
      config.num_banks = options.num_banks;
      config.num_grad_banks = options.num_grad_banks;
      config.instance_align = options.instance_align;
      configs_.push_back(config);
      pes_.push_back(r);
    }
    for (const auto& config : configs_) layouts_.emplace_back(config);
    const uec::EngineLayout& layout = layouts_[0];
    far_.resize(ranks * ranks);
    bases_.resize(ranks * ranks);
    call_bytes_ = 0;
    for (int32_t r = 0; r < ranks; ++r) {
      const int64_t staging = int64_t{options.max_blocks} * options.block_workers *
                              uec::kNumFarStages * options.tile_bytes;
      memory_.push_back(std::make_unique<Buffer>(layout.symmetric.total + staging));
      regions_.push_back(std::make_unique<Buffer>(layout.region_bytes));
      region_table_.push_back(reinterpret_cast<uint64_t>(regions_.back()->data()));
      for (int32_t i = 0; i < segments; ++i)
        for (int32_t m = 0; m < layouts_[r].num_local_experts[r]; ++m)
          main_weights_.push_back(std::make_unique<Buffer>(options.segment_bytes[i], options.skew));
      call_bytes_ =
          std::max(call_bytes_, uec::cuda::call_block_bytes(layouts_[r].capacity(configs_[r])));
    }
    for (const int64_t at : layout.region_offset) region_table_.push_back(at);
    blocks_ = std::make_unique<Buffer>(call_bytes_ * ranks);
    auto& network = emulation::Network::instance();
    network.bases.clear();
    network.bytes = layout.symmetric.total;
    for (int32_t r = 0; r < ranks; ++r) network.bases.push_back(memory_[r]->data());
    network.forget_signals();
    for (int32_t r = 0; r < ranks; ++r) init_state(r);
    if (const auto* const machine = ptx_machine::Client::instance()) describe(*machine);
  }

  virtual ~EmulatedGroup() = default;

  // Slots are counted through all banks.
  uint8_t* slot(int32_t rank, int32_t segment, int32_t slot) {
    const int32_t slots = std::max(group_.slots_per_rank, 1);
    return memory_[rank]->data() + layouts_[0].slots_of(slot / slots)[segment] +
           slot % slots * options_.segment_bytes[segment];
  }
  Status& status(int32_t rank) { return statuses_[rank]; }
  // What the host makes of a failure on the device, when nothing runs.
  uec::Report report(int32_t rank) {
    const auto& layout = layouts_[0].symmetric;
    uec::PeerStates peers(group_.num_ranks);
    for (int32_t r = 0; r < group_.num_ranks; ++r)
      peers[r] = {.record = {flag(rank, layout.call(r))}, .abort = {flag(rank, layout.abort(r))}};
    uec::Report report = status(rank).report;
    uec::name_root(peers, rank, &report);
    return report;
  }
  RankState& state(int32_t rank) { return states_[rank]; }
  PlanCase& group() { return group_; }
  std::vector<int32_t>& plan(int32_t rank) { return plans_[rank]; }
  uec::cuda::DeviceCall& device_call(int32_t rank) { return device_[rank]; }
  const uint8_t*& main(int32_t rank, int32_t index) { return tables_[rank][index]; }
  const Options& options() const { return options_; }
  std::vector<int32_t> counts(int32_t rank) const {
    return {rank_tables_[rank].counts, rank_tables_[rank].counts + group_.num_experts};
  }
  // All ranks' slots and their gradients, when nothing runs.
  std::vector<uint8_t> results() const {
    const auto& layout = layouts_[0].symmetric;
    std::vector<uint8_t> all;
    for (const auto& memory : memory_)
      all.insert(all.end(), memory->data() + layout.slots_base, memory->data() + layout.total);
    return all;
  }
  // A flag in a rank's symmetric memory.
  uint64_t flag(int32_t rank, int64_t offset) const {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(memory_[rank]->data() + offset)).load();
  }

  void set_flag(int32_t rank, int64_t offset, uint64_t value) {
    *reinterpret_cast<uint64_t*>(memory_[rank]->data() + offset) = value;
  }

  // A call that is not a transfer of weights.
  uint64_t begin_call() { return ++call_; }

  // Gives every rank its next call: fresh weights, and poison in all slots.
  void prepare(Mode mode, const std::vector<int32_t>& segments) {
    weights_ = ++call_;
    selected_ = segments;
    for (int32_t r = 0; r < group_.num_ranks; ++r) prepare_rank(r, mode, group_.slot_expert);
    poison_slots();
  }

  // One rank has another plan.
  void disagree(int32_t rank, Mode mode, const std::vector<int32_t>& slot_expert) {
    prepare_rank(rank, mode, slot_expert);
  }

  // The first `num_ranks` ranks of the group, in one launch; 0: all.
  void launch(int32_t num_blocks, int32_t num_ranks = 0, bool has_call_number = true) {
    launch_ranks(num_blocks, 0, num_ranks == 0 ? group_.num_ranks : num_ranks, has_call_number);
  }

  // Every rank in a launch of its own, as on devices of their own. What a rank has finished is
  // checked at once.
  void launch_apart(int32_t num_blocks) {
    Fibers ranks;
    for (int32_t r = 0; r < group_.num_ranks; ++r)
      ranks.spawn([this, num_blocks, r] {
        launch_ranks(num_blocks, r, 1);
        if (statuses_[r].failed_call == 0) check_rank(r);
      });
    ranks.wait();
  }

  void notify(int32_t rank, Notice notice) {
    auto states = reinterpret_cast<uint64_t>(&states_[rank]);
    auto what = static_cast<int64_t>(notice);
    void* args[] = {&states, &what};
    emulation::launch(
        "ultraep_replicate_notice", args,
        {.shared_bytes = sizeof(uec::cuda::BlockCall), .warps = 1, .first_rank = rank},
        [&](std::byte* memory) {
          auto& block = *reinterpret_cast<uec::cuda::BlockCall*>(memory);
          if (options_.far)
            uec::cuda::notify<true>(states_[rank], notice, block);
          else
            uec::cuda::notify<false>(states_[rank], notice, block);
        });
  }

  // Every byte of a rank's slots: the expert's of this call, or still poison.
  void check_slots(int32_t r) {
    for (int32_t s = 0; s < group_.slots_per_rank; ++s) {
      const int32_t expert = group_.slot_expert[r * group_.slots_per_rank + s];
      for (int32_t i = 0; i < num_segments(); ++i) {
        const bool filled = expert >= 0 && std::count(selected_.begin(), selected_.end(), i) > 0;
        const uint8_t* const bytes = slot(r, i, s);
        for (int64_t at = 0; at < options_.segment_bytes[i]; ++at)
          if (bytes[at] != (filled ? payload(weights_, expert, i, at) : kPoison)) {
            std::fprintf(stderr, "%s:%d: call %llu: rank %d, slot %d, segment %d, byte %lld\n",
                         __FILE__, __LINE__, static_cast<unsigned long long>(call_), r, s, i,
                         static_cast<long long>(at));
            std::_Exit(1);
          }
      }
    }
  }

  void check_success() {
    check_states();
    for (int32_t r = 0; r < group_.num_ranks; ++r) check_rank(r);
  }

  void check_states() {
    for (int32_t r = 0; r < group_.num_ranks; ++r) {
      CHECK_EQ(statuses_[r].failed_call, uint64_t{0});
      CHECK_EQ(states_[r].epoch, call_);
      CHECK_EQ(states_[r].entered, 0);
      CHECK_EQ(states_[r].left, 0);
    }
  }

 protected:
  // A rank's expected state after a successful call.
  virtual void check_rank(int32_t r) { check_slots(r); }

  virtual void run(const uec::cuda::LaunchArgs& args, emulation::Grid grid) {
    grid.warps = 2 * options_.block_workers;
    for (const RankState& state : states_)
      grid.shared_bytes = std::max(
          grid.shared_bytes,
          uec::cuda::shared_bytes(state.capacity, options_.tile_bytes, options_.block_workers));
    grid.is_own = [this, first = grid.first_rank](int32_t row, const void* at) {
      const auto offset = static_cast<const uint8_t*>(at) - memory_[first + row]->data();
      return offset >= 0 && offset < layouts_[0].symmetric.total;
    };
    const auto launch = [&](const char* name, auto kernel) {
      emulation::launch(name, args, grid, [&](std::byte* memory) { kernel(args, memory); });
    };
    using namespace uec::cuda;
    options_.far ? launch("ultraep_replicate_far", replicate<true>)
                 : launch("ultraep_replicate", replicate<false>);
  }

  static constexpr uint8_t kPoison = 0xEE;

  void launch_ranks(int32_t num_blocks, int32_t first, int32_t count, bool has_call_number = true) {
    CHECK(num_blocks <= options_.max_blocks);
    uec::cuda::LaunchArgs args;
    args.states = reinterpret_cast<uint64_t>(states_.data() + first);
    args.calls = reinterpret_cast<uint64_t>(blocks_->data() + first * call_bytes_);
    args.call_bytes = call_bytes_;
    args.has_call_number = has_call_number;
    args.bank = bank_;
    std::copy_n(device_.begin() + first, count, args.on_device);
    // As the launcher does: blocks wait for each other.
    run(args, {.blocks = num_blocks, .ranks = count, .first_rank = first, .together = true});
  }

  // Whose memory is whose, and what a rank relies on when its kernel has ended.
  void describe(const ptx_machine::Client& machine) {
    machine.forget();
    std::vector<uint8_t*> bases;
    const uec::SymmetricLayout& layout = layouts_[0].symmetric;
    for (int32_t r = 0; r < group_.num_ranks; ++r) {
      uint8_t* const base = memory_[r]->data();
      bases.push_back(base);
      machine.memory(base, layout.total, r);
      machine.memory(regions_[r]->data(), layouts_[r].region_bytes, r);
      machine.results(base + layout.slots_base, layout.total - layout.slots_base, r,
                      &states_[r].failed);
      machine.results(regions_[r]->data(), layouts_[r].region_bytes, r, &states_[r].failed);
      machine.results(base + layout.load_base,
                      layout.load(group_.num_ranks, group_.num_experts) - layout.load_base, r,
                      &states_[r].failed);
    }
    machine.memory(statuses_.data(), static_cast<int64_t>(statuses_.size() * sizeof(Status)), -1);
    machine.symmetric(bases.data(), group_.num_ranks, layout.total);
  }

  int32_t num_segments() const { return static_cast<int32_t>(options_.segment_bytes.size()); }

  void init_state(int32_t r) {
    RankState& state = states_[r];
    const int32_t ranks = group_.num_ranks;
    for (int32_t peer = 0; peer < ranks; ++peer) {
      const bool far = options_.far && group_.domain[peer] != group_.domain[r];
      far_[r * ranks + peer] = far;
      bases_[r * ranks + peer] = far ? nullptr : memory_[peer]->data();
    }
    uec::EngineConfig config = configs_[r];
    config.bases.assign(bases_.begin() + r * ranks, bases_.begin() + (r + 1) * ranks);
    config.call_timeout = options_.call_timeout;
    config.wait_timeout = options_.wait_timeout;
    const uec::Capacity capacity = layouts_[r].capacity(config);
    using namespace uec::cuda;
    const int64_t tables = Tables::cut(nullptr, capacity, &rank_tables_[r]);
    table_memory_[r].resize((tables + BankTables::cut(nullptr, capacity, &rank_banks_[r])) / 8);
    auto* const begin = reinterpret_cast<std::byte*>(table_memory_[r].data());
    Tables::cut(begin, capacity, &rank_tables_[r]);
    BankTables::cut(begin + tables, capacity, &rank_banks_[r]);
    const std::vector<uint8_t> far(far_.begin() + r * ranks, far_.begin() + (r + 1) * ranks);
    state = make_rank_state(config, layouts_[r], options_.far ? far : decltype(far){}, pes_,
                            rank_tables_[r], rank_banks_[r], 0);
    state.staging = reinterpret_cast<uint64_t>(memory_[r]->data() + state.layout.total);
    state.status = reinterpret_cast<uint64_t>(&statuses_[r]);
  }

  void prepare_rank(int32_t r, Mode mode, const std::vector<int32_t>& slot_expert) {
    device_[r] = {};
    if (plan_is_on_device(r)) return lend_plan(r, mode, slot_expert);
    uec::ReplicateArgs args;
    args.slot_expert = slot_expert.data();
    args.segments = selected_.data();
    args.num_segments = static_cast<int32_t>(selected_.size());
    args.mode = static_cast<int32_t>(mode);
    args.region = mode == Mode::kPull ? 0 : -1;
    const auto prepare = [&](auto&&... out) {
      return uec::fill_call(uec::SingleThread{}, layouts_[r].tables(configs_[r]), args, out...);
    };
    make_block(r, prepare, mode == Mode::kPull ? region_table_.data() : nullptr,
               [&](const uint8_t** main_ptrs) { write_main_ptrs(r, mode, main_ptrs); });
  }

  bool plan_is_on_device(int32_t r) const {
    return options_.plans == Plans::kOnDevice || (options_.plans == Plans::kMixed && r % 2 == 1);
  }

  // A rank's block, as the host's half makes it.
  template <class Prepare, class WriteMains>
  void make_block(int32_t r, const Prepare& prepare, const uint64_t* region,
                  const WriteMains& write) {
    const uec::cuda::RankState& state = states_[r];
    uec::cuda::PrepareArrays arrays;
    std::vector<uint64_t> memory(arrays.cut(nullptr, state.capacity) / 8);
    arrays.cut(reinterpret_cast<std::byte*>(memory.data()), state.capacity);
    uec::Call call;
    arrays.arrays.bind_arrays(&call);
    uec::PlanShape shape;
    const uint64_t digest = prepare(arrays.arrays, arrays.schedule, &shape, &call);
    write(arrays.arrays.main_ptrs);
    uec::cuda::pack_call(call, state.capacity, rank_tables_[r], rank_banks_[r], options_.far,
                         region, digest,
                         reinterpret_cast<std::byte*>(blocks_->data() + r * call_bytes_));
  }

  // What the host's half leaves to the device: the plan, and where the main weights are.
  void lend_plan(int32_t r, Mode mode, const std::vector<int32_t>& slot_expert) {
    plans_[r] = slot_expert;
    tables_[r].assign(num_segments() * layouts_[0].num_local_experts[r] + 1, nullptr);
    write_main_ptrs(r, mode, tables_[r].data());
    uec::cuda::DeviceCall& call = device_[r];
    call.slot_expert = reinterpret_cast<uint64_t>(plans_[r].data());
    call.home = reinterpret_cast<uint64_t>(group_.home.data());
    call.main_ptrs = reinterpret_cast<uint64_t>(tables_[r].data());
    call.mode = static_cast<int16_t>(mode);
    if (mode == Mode::kPull) {
      call.region_at = reinterpret_cast<uint64_t>(region_table_.data());
      call.region = 0;
    }
    for (const int32_t i : selected_) call.segments |= 1u << i;
  }

  void write_main_ptrs(int32_t r, Mode mode, const uint8_t** addresses) {
    int32_t first = 0;
    for (int32_t other = 0; other < r; ++other)
      first += layouts_[0].num_local_experts[other] * num_segments();
    const int32_t num_local = layouts_[0].num_local_experts[r];
    for (int32_t i = 0; i < num_segments(); ++i)
      for (int32_t m = 0; m < num_local; ++m) {
        uint8_t* to = main_weights_[first + i * num_local + m]->data();
        if (mode == Mode::kPull)
          to = regions_[r]->data() + layouts_[0].region_offset[i] + m * options_.segment_bytes[i];
        addresses[i * num_local + m] = to;
        int32_t expert = 0;
        while (group_.home[expert] != r || layouts_[0].local_idx[expert] != m) ++expert;
        for (int64_t at = 0; at < options_.segment_bytes[i]; ++at)
          to[at] = payload(weights_, expert, i, at);
      }
  }

  void poison_slots() {
    for (int32_t r = 0; r < group_.num_ranks; ++r)
      for (int32_t i = 0; i < num_segments(); ++i)
        std::fill_n(slot(r, i, 0), group_.slots_per_rank * options_.segment_bytes[i], kPoison);
  }

  PlanCase group_;
  Options options_;
  std::vector<RankState> states_;
  std::vector<Status> statuses_;
  std::vector<uec::cuda::DeviceCall> device_;        // [ranks]
  std::vector<std::vector<int32_t>> plans_;          // [ranks]
  std::vector<std::vector<const uint8_t*>> tables_;  // [ranks] of main weights
  std::vector<uec::cuda::Tables> rank_tables_;
  std::vector<uec::cuda::BankTables> rank_banks_;
  std::vector<std::vector<uint64_t>> table_memory_;  // of these
  std::vector<uec::EngineConfig> configs_;
  std::vector<uec::EngineLayout> layouts_;
  std::vector<std::unique_ptr<Buffer>> memory_, regions_, main_weights_;
  std::unique_ptr<Buffer> blocks_;
  std::vector<uint64_t> region_table_;  // as DeviceCall has it
  std::vector<uint8_t*> bases_;
  std::vector<uint8_t> far_;
  std::vector<int32_t> pes_;
  int64_t call_bytes_ = 0;
  std::vector<int32_t> selected_;
  uint64_t call_ = 0;
  uint64_t weights_ = 0;  // the call whose weights these are
  int32_t bank_ = -1;
};

}  // namespace device_tests
