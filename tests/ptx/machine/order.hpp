// What comes before what: happens-before, by vector clocks.
//
// A warp's clock goes up at each barrier of the whole warp (or block), and covers all that its
// lanes did before. Between two barriers a lane counts the steps at which it released something, so
// that one lane's release says nothing of the other lanes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace ptx_machine {

struct Moment {
  uint32_t lane;   // of all
  uint32_t clock;  // of its warp
  uint32_t step;   // of the lane since
};

// What comes before an ordinary access; before an access of the async proxy to global memory;
// before one to shared memory. The latter two are what a proxy fence has covered.
enum View : uint8_t { kGeneric, kAsyncGlobal, kAsyncShared };
inline constexpr int kViews = 3;

struct Known {
  int32_t refs = 0;
  struct Of {
    std::vector<uint32_t> warps;  // all of a warp before this clock
    std::vector<Moment> lanes;    // and of a lane before this moment

    bool covers(const Moment& m) const {
      if (m.lane / 32 < warps.size() && warps[m.lane / 32] > m.clock) return true;
      for (const Moment& k : lanes)
        if (k.lane == m.lane && (k.clock > m.clock || (k.clock == m.clock && k.step > m.step)))
          return true;
      return false;
    }
    void add_warp(uint32_t warp, uint32_t clock) {
      if (warps.size() <= warp) warps.resize(warp + 1);
      warps[warp] = std::max(warps[warp], clock);
    }
    void add(const Moment& m) {
      for (Moment& k : lanes)
        if (k.lane == m.lane) {
          if (k.clock < m.clock || (k.clock == m.clock && k.step < m.step)) k = m;
          return;
        }
      lanes.push_back(m);
    }
    // What the clock of a warp covers need not be said of its lanes.
    void forget_covered() {
      std::erase_if(lanes, [&](const Moment& k) {
        return k.lane / 32 < warps.size() && warps[k.lane / 32] > k.clock;
      });
    }
    void add(const Of& other) {
      if (warps.size() < other.warps.size()) warps.resize(other.warps.size());
      for (size_t w = 0; w < other.warps.size(); ++w) warps[w] = std::max(warps[w], other.warps[w]);
      for (const Moment& k : other.lanes) add(k);
      forget_covered();
    }
  } of[kViews];

  void add(const Known& other, int views = kViews) {
    for (int v = 0; v < views; ++v) of[v].add(other.of[v]);
  }
};

// Shared and not changed once others have it.
class KnownPtr {
 public:
  KnownPtr() = default;
  explicit KnownPtr(Known* known) : known_(known) {
    if (known_ != nullptr) ++known_->refs;
  }
  KnownPtr(const KnownPtr& other) : KnownPtr(other.known_) {}
  KnownPtr(KnownPtr&& other) noexcept : known_(std::exchange(other.known_, nullptr)) {}
  KnownPtr& operator=(KnownPtr other) noexcept {
    std::swap(known_, other.known_);
    return *this;
  }
  ~KnownPtr() {
    if (known_ != nullptr && --known_->refs == 0) delete known_;
  }

  static KnownPtr make() { return KnownPtr(new Known); }
  KnownPtr copy() const {
    auto* const known = new Known(*known_);
    known->refs = 0;
    return KnownPtr(known);
  }

  Known* get() const { return known_; }
  Known* operator->() const { return known_; }
  Known& operator*() const { return *known_; }
  explicit operator bool() const { return known_ != nullptr; }
  bool operator==(const KnownPtr& other) const { return known_ == other.known_; }

 private:
  Known* known_ = nullptr;
};

}  // namespace ptx_machine
