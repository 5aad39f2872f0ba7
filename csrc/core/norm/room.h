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
// much from the start. Multiples of eight are whole sectors of memory, in fp32. kSaveInput where a
// list would take more than half of what the flag saves.
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

// The updates of a norm's parameters, as far as the host can tell, and what reports are worth after
// them. After an optimizer's step parameters go on about as fast as before, which reports look
// ahead to. A move of the version counter by hand makes older reports void, unless it comes again
// where no optimizer is (a training loop of one's own). So do other memory, and moves that only the
// device sees, a few times; then they are a habit (FSDP).
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
    if (!in_backward && std::exchange(backward_ran_, false) && !changed_ && !stepped_) {
      last_move_ = 0;
      if (surprises_ == 0 || newest.moving) surprise();  // they may have moved unseen
    }
    return std::exchange(changed_, false);
  }

  // A look, or a backward call, is about to be launched. Returns the stamp of its report.
  uint16_t look() {
    used_ = true;
    return stamp_;
  }
  uint16_t backward(const ParamsSeen& now) {
    see(now, true);
    backward_ran_ = true;
    return look();
  }

  // Whether a report is good for the parameters of today. Reports of captured calls all have one
  // stamp. They are good after the second update, until there is a doubt, and again after a wait.
  bool covers(const Report& report, bool captured) const {
    const int age = static_cast<uint16_t>(stamp_ - report.stamp);
    return report.valid &&
           (captured ? !doubted_ && speed_known_ > 1 : age == 0 || age < speed_known_);
  }
  void waited() { doubted_ = false; }

  void doubt() { update(true); }             // reports so far are void
  void forget_speed() { speed_known_ = 0; }  // how fast the parameters move is not known any more

 private:
  static constexpr int kSurprises = 4;

  void update(bool doubtful) {
    ++stamp_;
    doubted_ |= doubtful;
    speed_known_ =
        doubtful ? std::min(speed_known_, 1) : std::min(speed_known_ + 1, kUpdatesAhead + 1);
    changed_ = true;
  }
  void surprise() {
    const bool is_new = surprises_ < kSurprises;
    surprises_ += is_new;
    update(is_new);
  }

  ParamsSeen known_;
  uint16_t stamp_ = 0;
  int speed_known_ = 0;  // to reports of fewer updates ago
  int surprises_ = 0;
  uint32_t last_move_ = 0;  // of the version, by hand
  bool changed_ = true;     // since a room was chosen
  bool doubted_ = true;
  bool stepped_ = false, used_ = false, backward_ran_ = false;
};

}  // namespace fused_norm
