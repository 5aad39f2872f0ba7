// How much room a memory_efficient call has for listed columns (columns.h), and what the host knows
// of them without asking the device. Plain C++, and no clock: what it knows is what it was told.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace fused_norm {

constexpr int64_t kMostRoom = int64_t{1} << 24;  // kernels keep places in the list as fp32
constexpr int64_t kSaveInput = -1;
constexpr int kUpdatesAhead = 16;  // of the parameters, that a report looks ahead

// What a look at the parameters found, and the word that has it, which is written at once. The
// stamp counts updates of the parameters. `moving`: looks have seen them change.
struct Report {
  int64_t at_risk;
  uint16_t stamp;
  bool moving, valid;
};
constexpr uint64_t pack_report(uint32_t at_risk, uint16_t stamp, bool moving) {
  return at_risk | uint64_t{stamp} << 32 | uint64_t{moving} << 62 | uint64_t{1} << 63;
}
constexpr Report unpack_report(uint64_t word) {
  return {static_cast<uint32_t>(word), static_cast<uint16_t>(word >> 32), (word >> 62 & 1) != 0,
          word >> 63 != 0};
}

// Whether the columns at risk come near the room: never those that it was chosen for.
constexpr bool is_near(int64_t at_risk, int64_t room, int64_t cols) {
  return room < cols && at_risk > room / 4 * 3;
}

// The room of a call that knows of so many columns at risk. One that can choose anew the next time
// has a third to spare, or no list at all. A `fixed` one, traced or captured, has four times as
// much from the start. Multiples of eight are whole sectors of memory, in fp32. kSaveInput where
// the columns at risk would take more than half of what the flag saves.
constexpr int64_t room_for(int64_t at_risk, int64_t cols, int64_t x_bytes, bool fixed) {
  if (at_risk == 0 && !fixed) return 0;
  const int64_t most = std::min(x_bytes == 8 ? cols / 2 : cols * x_bytes / 8, kMostRoom);
  const int64_t wanted = fixed ? std::max({int64_t{16}, cols / 256, std::min(4 * at_risk, most)})
                               : at_risk + at_risk / 3;
  const int64_t room = std::min({(wanted + 7) / 8 * 8, cols, kMostRoom});
  return at_risk > most || is_near(at_risk, room, cols) ? kSaveInput : room;
}

// Code that was compiled anew so many times for want of room saves inputs: that ends.
constexpr int kLastGeneration = 5;

// What the host sees of a norm's parameters without asking the device.
struct ParamsSeen {
  std::array<const void*, 2> memory{};
  uint32_t version = 0;  // of their counters
};

// What a norm's reports are worth. A report is good for the next kUpdatesAhead updates of the
// parameters, if it knows how fast they move; after any other change there is to be a new one.
//   update  an optimizer's step that moves the version counter or, since fused ones move none, that
//           follows a use of the norm
//   change  a move of the counter without a step, other memory, NaN in gradients, and where no
//           optimizer ever steps a forward call after a backward one
// Changes that come again are how a loop makes its updates, and count as such: moves of the counter
// where no optimizer steps, by as much as the last time; others after kSurprises of them. From then
// on other memory is nothing at all: FSDP gathers parameters anew.
class ParamsHistory {
 public:
  explicit ParamsHistory(const ParamsSeen& now) : known_(now) {}

  // Before every use of the parameters, and before an optimizer's step. Other memory in a backward
  // pass is no change: they were gathered anew for it.
  void see(ParamsSeen now, bool in_backward) {
    if (in_backward) now.memory = known_.memory;
    const ParamsSeen before = std::exchange(known_, now);
    if (const uint32_t move = now.version - before.version; move != 0) {
      update(stepped_ || move != last_move_);
      last_move_ = move;
    } else if (now.memory != before.memory && surprises_ < kSurprises) {
      surprise();
    }
  }

  // After an optimizer's step, which may be of other parameters: one that does not move the version
  // is an update once between two uses.
  void after_step(const ParamsSeen& now) {
    const bool moved = now.version != std::exchange(known_, now).version;
    stepped_ = true;
    if (std::exchange(used_, false) || moved) update(false);
  }

  // Of an eager forward call: whether it chooses a room, or has that of the call before. In a
  // backward pass it is the second forward pass of a checkpoint, which saves what the first did.
  bool chooses(const ParamsSeen& now, const Report& newest, bool in_backward) {
    see(now, in_backward);
    used_ = true;
    if (!in_backward && std::exchange(backward_ran_, false) && chosen_at_ == updates_ &&
        !stepped_) {
      last_move_ = 0;
      if (surprises_ == 0 || newest.moving) surprise();  // they may have moved unseen
    }
    return std::exchange(chosen_at_, updates_) != updates_;
  }
  void backward(const ParamsSeen& now) {
    see(now, true);
    used_ = backward_ran_ = true;
  }

  // A look is about to be launched, alone or in a backward call. Returns the stamp of its report.
  uint16_t look() {
    used_ = true;
    looked_at_ = updates_;
    return static_cast<uint16_t>(updates_);
  }

  // Whether a report is good for the parameters of today. Captured calls report with the stamp of
  // their capture for ever: what they report is good once it was waited for, until a change.
  bool covers(const Report& report, bool captured) const {
    if (!report.valid || captured) return report.valid && waited_at_ >= good_from_;
    const int age = static_cast<uint16_t>(updates_ - report.stamp);
    const bool is_old = age > kUpdatesAhead || updates_ - looked_at_ > kUpdatesAhead;
    return !is_old && (age == 0 || updates_ - age >= good_from_);
  }
  void waited() { waited_at_ = updates_; }
  void doubt() { update(true); }  // a change that was seen elsewhere

 private:
  static constexpr int kSurprises = 4;

  void update(bool is_change) {
    ++updates_;
    if (is_change) good_from_ = std::max(good_from_ + 1, updates_);
  }
  void surprise() { update(surprises_++ < kSurprises); }

  ParamsSeen known_;
  int64_t updates_ = 0;    // and changes
  int64_t good_from_ = 1;  // reports look ahead that were made after so many of them
  int64_t looked_at_ = 0, waited_at_ = -1, chosen_at_ = -1;  // likewise
  int64_t surprises_ = 0;
  uint32_t last_move_ = 0;  // of the version, by hand
  bool stepped_ = false, used_ = false, backward_ran_ = false;
};

// The least rooms of the backward calls whose gradients the next optimizer's step may take: of
// those since the last step, and of captured ones, which may be replayed.
struct RoomsInUse {
  static constexpr int64_t kNone = kMostRoom + 1;
  int64_t of_step = kNone, captured = kNone;
  bool fixed = false;  // one of them is changed by compiling anew alone

  void add(int64_t room, bool is_captured, bool is_fixed) {
    int64_t& least = is_captured ? captured : of_step;
    least = std::min(least, room);
    fixed |= is_fixed;
  }
  bool any() const { return std::min(of_step, captured) < kNone; }
  bool are_near(const Report& report, int64_t cols) const {
    return any() && is_near(report.at_risk, std::min(of_step, captured), cols);
  }
  // Returns whether to compile anew: once for each such call.
  bool end_step(const Report& report, int64_t cols) {
    const bool anew = fixed && are_near(report, cols);
    fixed &= !anew;
    of_step = kNone;
    return anew;
  }
};

}  // namespace fused_norm
