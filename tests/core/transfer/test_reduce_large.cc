// Gradients beyond 32 bits: every address that a reduction hands to its adder, over memory that is
// reserved and never touched.
#include <sys/mman.h>

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "core/transfer/reduced.hpp"

namespace {

using uec::GradType;
using uec::Mode;
using uec::SingleThread;
using uec::Step;

// Addresses, of which the first `used` bytes may be followed.
class Reserved {
 public:
  explicit Reserved(int64_t bytes, int64_t used = 0) : bytes_(static_cast<size_t>(bytes)) {
    void* const at =
        mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(at != MAP_FAILED);
    base_ = static_cast<uint8_t*>(at);
    CHECK(used == 0 || mprotect(base_, static_cast<size_t>(used), PROT_READ | PROT_WRITE) == 0);
  }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  ~Reserved() { munmap(base_, bytes_); }
  uint8_t* base() const { return base_; }
  // The offset of an address in it, else -1.
  int64_t offset_of(const uint8_t* at) const {
    return at >= base_ && at < base_ + bytes_ ? at - base_ : -1;
  }

 private:
  uint8_t* base_ = nullptr;
  size_t bytes_;
};

struct Part {  // of an expert: `elements` from `offset` of a segment's slot on
  int32_t expert, segment;
  int64_t offset, elements;
  friend bool operator==(const Part&, const Part&) = default;
};

// Experts 0 and 1 of three ranks, of a few gibibytes each.
struct Large {
  Large() : c(make_group(3, 3, 2)) {
    for (const auto& [expert, rank] : {std::pair{0, 1}, {0, 2}, {1, 0}, {1, 2}, {2, 1}})
      CHECK(c.plan.place(expert, rank));
    c.tile_bytes = 1 << 20;
    c.add_segment((int64_t{5} << 30) + 12, GradType::kFloat32, GradType::kBFloat16);
    c.add_segment(4, GradType::kFloat32, GradType::kFloat32);
    c.add_segment((int64_t{3} << 30) + (1 << 20), GradType::kBFloat16, GradType::kFloat32);
    layout = uec::SymmetricLayout::make(c.plan.topology(), 1, 0, 0, nullptr, nullptr,
                                        c.tables(0).grads, c.tile_bytes, c.grad_offset.data());
    for (int32_t r = 0; r < 3; ++r) {
      memory.push_back(std::make_unique<Reserved>(layout.total, layout.slots_base));
      bases.push_back(memory.back()->base());
      for (int32_t i = 0; i < c.num_segments(); ++i)
        main_grads.push_back(std::make_unique<Reserved>(main_bytes(i)));
    }
  }

  int64_t main_bytes(int32_t segment) const {
    return c.grad_bytes[segment] / bytes_of(c.grad_type[segment]) * bytes_of(c.main_type[segment]);
  }

  // The part of an expert at an address in a slot, and the slot's rank.
  std::pair<Part, int32_t> in_slot(const uint8_t* at, int64_t elements) const {
    for (int32_t r = 0; r < 3; ++r) {
      const int64_t offset = memory[r]->offset_of(at);
      for (int32_t i = 0; i < c.num_segments() && offset >= 0; ++i) {
        const int64_t inside = offset - c.grad_offset[i];
        if (inside < 0 || inside >= 2 * c.grad_bytes[i]) continue;
        const int64_t begin = inside % c.grad_bytes[i];
        CHECK(begin + elements * bytes_of(c.grad_type[i]) <= c.grad_bytes[i]);
        const int32_t expert = c.plan.slot_expert[2 * r + inside / c.grad_bytes[i]];
        return {{expert, i, begin, elements}, r};
      }
    }
    CHECK(!"an address in a slot");
    return {};
  }

  ReduceCase c;
  uec::SymmetricLayout layout;
  std::vector<std::unique_ptr<Reserved>> memory, main_grads;  // [ranks], [ranks * segments]
  std::vector<uint8_t*> bases;
  std::map<const uint8_t*, Part> sums;
  std::map<std::tuple<int32_t, int32_t, int64_t>, int64_t> added;  // main, segment, from: bytes
  int64_t cleared = 0;
};

// Records its calls.
class NotingAdder : public uec::DeliveryPolicy {
 public:
  NotingAdder(Large& large, int32_t rank) : large_(large), rank_(rank) {}

  template <class Source>
  void sum(uint8_t* to, int32_t n, Source&& source, int64_t elements, GradType type) {
    const Part part = replicas(n, source, elements, type);
    if (type == GradType::kFloat32) {
      CHECK(large_.in_slot(to, elements) == (std::pair{part, rank_}));
    } else {
      const int64_t at = large_.memory[rank_]->offset_of(to) - large_.layout.sums_base;
      CHECK(at >= 0 && at % large_.layout.sums_bytes + 4 * elements <= large_.layout.sums_bytes);
      CHECK(at < 2 * large_.layout.sums_bytes);
    }
    CHECK(large_.sums.insert({to, part}).second);
  }

  template <class Source>
  void add(uint8_t* main, GradType main_type, int32_t n, Source&& source, int64_t elements,
           GradType type) {
    const auto sum = large_.sums.find(source(0));
    const bool summed = sum != large_.sums.end();
    CHECK(!summed || (n == 1 && type == GradType::kFloat32));
    const Part part = summed ? sum->second : replicas(n, source, elements, type);
    CHECK_EQ(part.elements, elements);
    CHECK_EQ(part.expert, rank_);  // expert r is at home on rank r
    CHECK(main_type == large_.c.main_type[part.segment]);
    const int64_t at =
        large_.main_grads[rank_ * large_.c.num_segments() + part.segment]->offset_of(main);
    CHECK_EQ(at / bytes_of(main_type), part.offset / bytes_of(large_.c.grad_type[part.segment]));
    CHECK(large_.added.insert({{rank_, part.segment, at}, elements * bytes_of(main_type)}).second);
  }

  void zero(uint8_t* to, int64_t bytes) {
    CHECK_EQ(large_.in_slot(to, 0).second, rank_);
    large_.cleared += bytes;
  }

  static bool vacant() { return true; }
  static uint32_t ticket() { return 0; }
  template <class F>
  bool try_delivered(uint32_t, F&& then) {
    then(delivered());
    return true;
  }
  template <class F>
  bool wait_delivered(uint32_t, bool, F&& then) {
    return try_delivered(0, then);
  }
  void loads_complete() {}

 private:
  // Adds the same part of all replicas of one expert, by ascending rank.
  template <class Source>
  Part replicas(int32_t n, Source&& source, int64_t elements, GradType type) {
    Part part{};
    int32_t before = -1;
    for (int32_t i = 0; i < n; ++i) {
      const auto [own, rank] = large_.in_slot(source(i), elements);
      CHECK(i == 0 || own == part);
      CHECK(rank > before);
      part = own;
      before = rank;
    }
    CHECK(type == large_.c.grad_type[part.segment]);
    const auto& all = large_.c.plan.slot_expert;
    CHECK_EQ(n, std::count(all.begin(), all.end(), part.expert));
    return part;
  }

  Large& large_;
  int32_t rank_;
};

void check(Mode mode) {
  Large large;
  ReduceCase& c = large.c;
  c.mode = static_cast<int32_t>(mode);
  using Memory = reducing::PlainMemory<SingleThread>;
  std::vector<std::unique_ptr<Given>> given;
  std::vector<Memory> memories;
  std::vector<NotingAdder> adders;
  std::vector<WorkerScratch> scratch;
  for (int32_t r = 0; r < 3; ++r) {
    given.push_back(std::make_unique<Given>(c.capacity(r)));
    uec::Call& call = given[r]->call;
    const uint64_t digest = prepare_reduction(SingleThread{}, c, r, *given[r]);
    call.rank = r;
    call.num_ranks = 3;
    call.layout = large.layout;
    call.epoch = {1, uec::CallRecord::make(1, digest, uec::RecordKind::kCall)};
    call.addresses.bases = large.bases.data();
    call.addresses.num_local_experts = 1;
    for (int32_t i = 0; i < c.num_segments(); ++i)
      given[r]->arrays.main_ptrs[i] = large.main_grads[r * c.num_segments() + i]->base();
    call.reset_counters(SingleThread{});
    scratch.emplace_back(3, c.capacity(r).striped());
    memories.emplace_back(large.bases.data(), r);
    adders.emplace_back(large, r);
  }
  uec::UnpublishedGroup held[3][uec::kMaxUnpublished];
  std::vector<uec::Reducer<Memory, NotingAdder>> reducers;
  for (int32_t r = 0; r < 3; ++r) {
    uec::announce_call(given[r]->call, memories[r], adders[r]);
    uec::announce_open(given[r]->call, memories[r], adders[r]);
    reducers.emplace_back(given[r]->call, memories[r], adders[r], scratch[r].stripe, held[r],
                          uec::Stripe{});
  }
  for (int32_t running = 3; running > 0;) {
    running = 0;
    for (auto& reducer : reducers) {
      const Step step = reducer.step();
      CHECK(step != Step::kFailed);
      running += step != Step::kFinished;
    }
  }
  // Every byte of a main gradient once, in parts that follow each other.
  int64_t slot_bytes = 0;
  for (int32_t i = 0; i < c.num_segments(); ++i) {
    slot_bytes += c.grad_bytes[i];
    for (int32_t r = 0; r < 3; ++r) {
      int64_t at = 0;
      for (auto part = large.added.lower_bound({r, i, 0});
           part != large.added.end() && part->first < std::tuple{r, i + 1, int64_t{0}}; ++part) {
        CHECK_EQ(std::get<2>(part->first), at);
        at += part->second;
      }
      CHECK_EQ(at, large.main_bytes(i));
    }
  }
  CHECK_EQ(large.cleared, 5 * slot_bytes);
  CHECK_EQ(large.sums.empty(), mode == Mode::kDirect);
}

}  // namespace

int main() {
  check(Mode::kPull);
  check(Mode::kDirect);
}
