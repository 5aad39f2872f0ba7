// How much room calls have for listed columns, and when the host looks or waits.
#include "core/norm/room.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "core/norm/recoverable.h"

namespace fused_norm {
namespace {

int memory[4];
ParamsSeen seen(uint32_t version, int at = 0) { return {{&memory[at], nullptr}, version}; }

enum Choice { kKeep, kFromReport, kLook };

// A training loop as the host sees it. Each step is one forward and one backward pass, whose report
// is read `late` backward passes later.
struct Loop {
  uint32_t version = 7;
  int at = 0, late = 0;
  bool moving = true;
  ParamsHistory history{seen(7)};
  std::vector<Report> reports = std::vector<Report>(1);

  const Report& newest() const {
    return reports[reports.size() > late ? reports.size() - 1 - late : 0];
  }
  void report() { reports.push_back({0, history.look(), moving, true}); }

  Choice forward(bool in_backward = false) {
    if (!history.chooses(seen(version, at), newest(), in_backward)) return kKeep;
    if (history.covers(newest(), false)) return kFromReport;
    report();
    for (int i = 0; i < late; ++i) reports.push_back(reports.back());
    EXPECT_TRUE(history.covers(newest(), false));
    return kLook;
  }
  void backward() {
    history.backward(seen(version, at));
    report();
  }
  // Whether the step waits for a report.
  bool optimizer_step(int moves = 1, bool captured = false) {
    history.see(seen(version, at), false);
    const bool waits = !history.covers(newest(), captured);
    if (waits) history.waited();
    version += moves;
    history.after_step(seen(version, at));
    return waits;
  }
  Choice step(int moves = 1) {
    const Choice choice = forward();
    backward();
    optimizer_step(moves);
    return choice;
  }
};

int64_t eager_room(int64_t at_risk, int64_t cols) { return room_for(at_risk, cols, 2, false); }
int64_t fixed_room(int64_t at_risk, int64_t cols) { return room_for(at_risk, cols, 2, true); }

TEST(Room, ReportsSurviveTheirWord) {
  const Report found = unpack_report(pack_report(1 << 30, 0xfedc, true));
  EXPECT_TRUE(found.valid && found.moving);
  EXPECT_EQ(found.stamp, 0xfedc);
  EXPECT_EQ(found.at_risk, 1 << 30);
  EXPECT_FALSE(unpack_report(pack_report(0, 0, false)).moving);
  EXPECT_TRUE(unpack_report(pack_report(0, 0, false)).valid);
  EXPECT_FALSE(unpack_report(0).valid);
}

TEST(Room, AnEagerCallHasRoomForWhatItKnows) {
  EXPECT_EQ(eager_room(0, 4096), 0);
  // The list takes at most half of what the flag saves: of 16 bit a quarter of the columns in fp32.
  for (int64_t columns = 1; columns <= 1024; ++columns) {
    const int64_t room = eager_room(columns, 4096);
    EXPECT_GT(room, columns);
    EXPECT_FALSE(is_near(columns, room, 4096));
    EXPECT_EQ(room % 4, 0);
    EXPECT_LE(room, columns + columns / 3 + 7);
  }
  EXPECT_EQ(eager_room(8, 4096), 16);
  EXPECT_EQ(eager_room(1025, 4096), kSaveInput);
  for (int x_bytes : {4, 8}) {
    EXPECT_GT(room_for(2048, 4096, x_bytes, false), 2048);
    EXPECT_EQ(room_for(2049, 4096, x_bytes, false), kSaveInput);
  }
  for (int64_t columns = kMostRoom - 9; columns < kMostRoom + 9; ++columns)
    EXPECT_LE(room_for(columns, int64_t{1} << 30, 4, false), kMostRoom);
}

TEST(Room, ACallThatCannotChooseHasRoomToSpare) {
  for (int64_t cols : {1, 15, 16, 17, 264, 4096, 5000, 50257, 1 << 20}) {
    const int64_t least = fixed_room(0, cols);
    EXPECT_GE(least, std::min<int64_t>(cols, 16));
    EXPECT_GE(least, std::min(cols, cols / 256));
    EXPECT_LE(least, cols);
    for (int64_t at_risk = 0; at_risk <= cols; at_risk += 1 + at_risk / 7) {
      const int64_t room = fixed_room(at_risk, cols);
      EXPECT_TRUE(room == kSaveInput || !is_near(at_risk, room, cols)) << cols << " " << at_risk;
      EXPECT_TRUE(room == kSaveInput || room >= least);
    }
    EXPECT_EQ(fixed_room(cols, cols), kSaveInput);  // and where nothing is known
  }
  EXPECT_EQ(fixed_room(8, 4096), 32);
}

TEST(Room, CompilingAnewEnds) {
  // Whatever becomes of the columns, room that was too small is so only a few times.
  for (int64_t cols : {32, 264, 4096, 65536}) {
    int64_t at_risk = 0, room = 0;
    int compiled = 0;
    for (; (room = fixed_room(at_risk, cols)) != kSaveInput; ++compiled) {
      while (at_risk < cols && !is_near(at_risk, room, cols)) ++at_risk;
      if (at_risk == cols) break;
    }
    EXPECT_LE(compiled, kLastGeneration);
  }
}

TEST(Room, OrdinaryTrainingLooksTwice) {
  for (bool moving : {false, true}) {  // bf16 weights of 1 need not
    for (int moves : {0, 1, 2}) {      // fused optimizers move no counter
      Loop loop;
      loop.moving = moving;
      EXPECT_EQ(loop.step(moves), kLook);
      EXPECT_EQ(loop.step(moves), kLook);  // how fast the parameters move was not known
      for (int step = 0; step < 20; ++step) EXPECT_EQ(loop.step(moves), kFromReport);
    }
  }
}

TEST(Room, ReportsMayBeLateButNotTooLate) {
  Loop loop;
  for (int step = 0; step < 20; ++step) loop.step();
  loop.late = kUpdatesAhead - 1;
  for (int step = 0; step < 40; ++step) EXPECT_EQ(loop.step(), kFromReport);
  loop.late = kUpdatesAhead;
  EXPECT_EQ(loop.step(), kLook);
}

TEST(Room, EvaluationAndAccumulationChangeNothing) {
  Loop loop;
  for (int step = 0; step < 3; ++step) loop.step();
  EXPECT_EQ(loop.forward(), kFromReport);
  EXPECT_EQ(loop.forward(), kKeep);
  loop.backward();
  loop.backward();
  EXPECT_EQ(loop.forward(), kKeep);
}

TEST(Room, AChangeByHandIsLookedAt) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  for (int moves : {1, 1, 3}) {  // the same one too
    loop.version += moves;
    EXPECT_EQ(loop.step(), kLook);
    EXPECT_EQ(loop.step(), kFromReport);
  }
  loop.at = 1;
  EXPECT_EQ(loop.step(), kLook);
  EXPECT_EQ(loop.step(), kFromReport);
}

TEST(Room, AChangeByHandBetweenBackwardAndStepIsLookedAt) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  loop.forward();
  loop.backward();
  ++loop.version;
  EXPECT_TRUE(loop.optimizer_step());
  EXPECT_EQ(loop.forward(), kLook);
}

TEST(Room, AChangeByHandIsSeenBeforeAnotherOptimizersStep) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  ++loop.version;          // by hand,
  loop.optimizer_step(0);  // and then a step that leaves these parameters alone
  EXPECT_EQ(loop.forward(), kLook);
}

TEST(Room, CapturedCodeWaitsUntilItIsKnownHowFastParametersMove) {
  Loop loop;
  loop.forward();
  loop.backward();
  for (bool waits : {true, true, false, false}) EXPECT_EQ(loop.optimizer_step(1, true), waits);
}

TEST(Room, StepsOfOtherOptimizersAreOne) {
  Loop loop;
  for (int step = 0; step < 40; ++step) {
    EXPECT_EQ(loop.forward(), step < 2 ? kLook : kFromReport);
    loop.backward();
    for (int optimizer = 0; optimizer < 100; ++optimizer) loop.optimizer_step(optimizer == 7);
  }
}

TEST(Room, ANormThatRestsMayBeMovedAllTheSame) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  for (int step = 0; step < kUpdatesAhead; ++step) loop.optimizer_step();  // by momentum
  EXPECT_EQ(loop.forward(), kLook);
  for (int step = 0; step < 40; ++step) loop.optimizer_step(0);  // of others
  EXPECT_EQ(loop.forward(), kFromReport);
}

TEST(Room, AReportDoesNotComeOfAgeAgain) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  for (int step = 0; step < (1 << 16); ++step) loop.optimizer_step();  // by momentum, unused
  EXPECT_EQ(loop.forward(), kLook);
}

TEST(Room, AStepThatFollowsAChangeByHandWaitsOnceForCapturedCode) {
  Loop loop;
  for (int step = 0; step < 3; ++step) loop.optimizer_step(1, true);
  loop.history.doubt();
  loop.report();
  EXPECT_TRUE(loop.optimizer_step(0, true));
  EXPECT_FALSE(loop.optimizer_step(0, true));  // nothing was updated since
}

Report at_risk(int64_t columns) { return {columns, 0, true, true}; }

TEST(Room, AStepHeedsTheLeastRoomOfItsBackwardCalls) {
  RoomsInUse rooms;
  EXPECT_FALSE(rooms.any() || rooms.are_near(at_risk(48), 48));
  rooms.add(32, false, true);
  rooms.add(16, false, false);
  EXPECT_FALSE(rooms.are_near(at_risk(12), 48));
  EXPECT_TRUE(rooms.are_near(at_risk(13), 48));
  EXPECT_FALSE(rooms.end_step(at_risk(12), 48));
  EXPECT_FALSE(rooms.any());  // of the next step
  EXPECT_FALSE(rooms.are_near(at_risk(48), 48));
}

TEST(Room, CapturedCallsMayBeReplayedBeforeEveryStep) {
  RoomsInUse rooms;
  rooms.add(16, true, true);
  EXPECT_FALSE(rooms.end_step(at_risk(12), 48));
  EXPECT_TRUE(rooms.any() && rooms.are_near(at_risk(13), 48));
}

TEST(Room, CodeIsCompiledAnewOnceForACallNearItsRoom) {
  RoomsInUse eager, fixed;
  eager.add(16, false, false);
  EXPECT_FALSE(eager.end_step(at_risk(48), 48));  // chooses anew by itself
  for (int time = 0; time < 2; ++time) {
    fixed.add(16, true, true);
    EXPECT_TRUE(fixed.end_step(at_risk(13), 48));
    EXPECT_FALSE(fixed.end_step(at_risk(13), 48));
  }
}

TEST(Room, GradientsThatBecameNaNAreAReasonToLook) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  loop.history.doubt();
  EXPECT_EQ(loop.forward(), kLook);
}

TEST(Room, TrainingByHandBecomesAHabit) {
  Loop loop;
  for (int step = 0; step < 8; ++step) {
    EXPECT_EQ(loop.forward(), step < 3 ? kLook : kFromReport) << step;
    loop.backward();
    ++loop.version;
  }
  ++loop.version;  // zeroed, too
  EXPECT_EQ(loop.forward(), kLook);
}

TEST(Room, OtherMemoryBecomesAHabit) {
  Loop loop;
  int looks = 0;
  for (int step = 0; step < 10; ++step) {
    loop.at = step % 3;
    looks += loop.step() == kLook;
  }
  EXPECT_LE(looks, 6);
  EXPECT_EQ(loop.step(), kFromReport);
}

TEST(Room, ACheckpointSavesTheSameTwice) {
  Loop loop;
  for (int step = 0; step < 8; ++step) {
    loop.at = step % 2;  // gathered anew
    loop.step();
  }
  loop.forward();
  loop.at = 2;
  EXPECT_EQ(loop.forward(/*in_backward=*/true), kKeep);
  loop.backward();
  EXPECT_EQ(loop.forward(/*in_backward=*/true), kKeep);
  EXPECT_FALSE(loop.optimizer_step());
  EXPECT_EQ(loop.forward(/*in_backward=*/true), kFromReport);  // the first had no gradients
}

TEST(Room, WeightsThatMayMoveUnseenAreLookedAtForAWhile) {
  for (bool moving : {false, true}) {
    Loop loop;
    loop.moving = moving;
    int looks = 0, kept = 0;
    for (int step = 0; step < 20; ++step) {
      const Choice choice = loop.forward();
      looks += choice == kLook;
      kept += choice == kKeep;
      loop.backward();
    }
    EXPECT_EQ(looks, moving ? 6 : 2);
    EXPECT_EQ(kept, moving ? 0 : 18);
  }
}

TEST(Room, AStepWaitsOnlyForWhatIsNotKnown) {
  // Of compiled code, which has looked when it was traced.
  Loop loop;
  loop.report();
  for (int step = 0; step < 20; ++step) {
    loop.late = 1;  // the step's own
    loop.backward();
    EXPECT_EQ(loop.optimizer_step(), step == 1) << step;
  }
  ++loop.version;
  loop.backward();
  EXPECT_TRUE(loop.optimizer_step());
  // A new norm, of which nobody knows anything.
  EXPECT_FALSE(ParamsHistory(seen(0)).covers(unpack_report(0), false));
}

TEST(Room, ReplayedGraphsReportWithOneStamp) {
  Loop loop;
  for (int step = 0; step < 3; ++step) loop.step();
  EXPECT_TRUE(loop.optimizer_step(1, /*captured=*/true));
  for (int step = 0; step < 40; ++step) EXPECT_FALSE(loop.optimizer_step(1, true));
  ++loop.version;
  EXPECT_TRUE(loop.optimizer_step(1, true));
  EXPECT_FALSE(loop.optimizer_step(1, true));
}

// An eager norm with its columns, which looks at them as kernels do (columns.cuh).
struct Norm {
  static constexpr int kCols = 48;
  std::array<float, kCols> weight, before{}, speed{};
  float bias = 0.125f;
  bool looked = false;
  Loop loop;
  std::vector<Report>& reports = loop.reports;

  Norm() { weight.fill(1); }
  bool is_lost(float g) const { return !meets(precise_limits<float>(DType::kFloat32), g, bias); }

  void look() {
    int at_risk = 0;
    bool moving = false;
    for (int col = 0; col < kCols; ++col) {
      const float g = weight[col], step = std::fabs(g - before[col]);
      if (looked && step > 0) speed[col] = std::max(step, speed[col] / 2);
      moving |= speed[col] > 0;
      const float nearest = std::fabs(g) - 2 * kUpdatesAhead * speed[col];
      at_risk += is_lost(g) || is_lost(nearest / 2) || nearest <= 0;
    }
    before = weight;
    looked = true;
    reports.push_back({at_risk, loop.history.look(), moving, true});
  }

  void forward_and_backward() {
    const ParamsSeen now = seen(loop.version, loop.at);
    ParamsHistory& history = loop.history;
    if (history.chooses(now, loop.newest(), false)) {
      if (!history.covers(loop.newest(), false)) {
        look();
        reports = {static_cast<size_t>(loop.late + 1), reports.back()};
        ++looks;
      }
      room = room_for(loop.newest().at_risk, kCols, 4, false);
    }
    const auto lost =
        std::count_if(weight.begin(), weight.end(), [&](float g) { return is_lost(g); });
    EXPECT_TRUE(room == kSaveInput || lost <= room) << lost << " lost, room for " << room;
    history.backward(now);
    look();
  }
  // Towards zero and beyond it, and back.
  void train(int steps, float size, int moves) {
    for (int step = 0; step < steps; ++step) {
      forward_and_backward();
      for (int col = 0; col < kCols; ++col)
        weight[col] += (col + steps_made / 50) % 2 == 0 ? size : -size;
      ++steps_made;
      loop.optimizer_step(moves);
    }
  }

  int64_t room = 0;
  int looks = 0, steps_made = 0;
};

TEST(Room, SufficesForWeightsThatCrossZero) {
  for (float size : {1e-3f, 3e-2f}) {
    for (int late : {0, 1, kUpdatesAhead - 1}) {
      for (int moves : {0, 1, 2}) {
        Norm norm;
        norm.weight.fill(10 * size);
        norm.loop.late = late;
        norm.train(400, size, moves);
        EXPECT_EQ(norm.looks, 2) << late;
      }
    }
  }
}

TEST(Room, SufficesAtOnceAfterWhatTheHostSees) {
  const auto zero_some = [](Norm& norm) {
    for (int col = 0; col < Norm::kCols; col += 7) norm.weight[col] = 0;
  };
  const std::function<void(Norm&)> events[] = {
      [&](Norm& norm) { zero_some(norm), ++norm.loop.version; },
      [&](Norm& norm) { norm.weight.fill(0), norm.loop.version += 3; },
      [&](Norm& norm) { zero_some(norm), norm.loop.at = 1 - norm.loop.at; },
      [&](Norm& norm) { norm.weight.fill(0), norm.loop.at = 1 - norm.loop.at; },
  };
  for (const auto& event : events) {
    Norm norm;
    for (int time = 0; time < 2; ++time) {
      norm.train(5, 1e-3f, 1);
      norm.forward_and_backward();
      event(norm);
      for (int call = 0; call < 3; ++call) norm.forward_and_backward();
      norm.train(3, 1e-3f, 1);
      norm.weight.fill(1);
      ++norm.loop.version;
    }
  }
}

TEST(Room, SufficesForMovesThatNobodyAnnouncesWhereNoOptimizerIs) {
  Norm norm;
  for (float weight : {1.0f, 0.5f, 0.0f, 2.0f}) {
    norm.weight.fill(weight);
    norm.forward_and_backward();
  }
  for (int step = 0; step < 60; ++step) {  // and as a habit
    for (float& weight : norm.weight) weight -= 0.05f;
    norm.forward_and_backward();
  }
  EXPECT_LE(norm.looks, 6);
}

}  // namespace
}  // namespace fused_norm
