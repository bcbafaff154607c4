"""Watches a worker's steps from inside: what was drafted, what was verified, what is wrong."""

from __future__ import annotations

from typing import Any


class DraftLog:
    """Every draft of any speculator: [request, tokens so far, tokens it just emitted, draft]."""

    def __init__(self, runner: Any) -> None:
        self.rows: list[list[Any]] = []
        self.beside_chunks = 0  # steps that verified drafts and ran an unfinished prefill
        self._runner = runner
        self._propose = runner.speculator.propose
        runner.speculator.propose = self

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = self._propose(batch, *args, **kwargs)
        emitted = args[4].tolist()
        totals = self._runner.req_states.total_len.gpu[batch.idx_mapping].tolist()
        self.beside_chunks += batch.num_draft_tokens > 0 and 0 in emitted
        self.rows += [
            [name.split("-")[0], total, count, row]
            for name, total, count, row in zip(
                batch.req_ids, totals, emitted, tokens.tolist(), strict=True
            )
            if count
        ]
        return tokens


class StepProbe:
    """Checks every step of a packed speculator and its manager; `broken` says what failed."""

    def __init__(self, runner: Any) -> None:
        self.broken: list[str] = []
        self.budgets: list[int] = []  # D of every draft
        self.verified: list[int] = []  # B of every verification that had drafts scheduled
        self.lengths: list[int] = [0] * (runner.speculator.num_speculative_steps + 1)
        self.opted_out: set[str] = set()
        self.refused = 0  # draft places that an opt-out left unused
        self.uneven = {"draft": 0, "verify": 0}  # steps whose lengths no even split would hit
        self._runner = runner
        self._drafts: dict[str, list[int]] = {}
        self._propose = runner.speculator.propose
        self._prepare = runner.prepare_inputs
        runner.speculator.propose = self._checked_propose
        runner.prepare_inputs = self._checked_prepare
        if runner.speculator.host_split:
            self._watch_drafter_lengths()

    def _watch_drafter_lengths(self) -> None:
        """Every packed draft: the attention metadata's lengths on the host are the device's."""
        from forespark.drafter import batch

        build = batch.build_attn_metadata

        def checked(**given: Any) -> Any:
            host, device = given["query_start_loc_cpu"], given["query_start_loc_gpu"]
            self._same_lengths("draft", host.tolist(), device.tolist())
            self._expect(given["max_query_len"] == int(device.diff().max()), "longest draft")
            return build(**given)

        batch.build_attn_metadata = checked

    def _same_lengths(self, stage: str, host: list[int], device: list[int]) -> None:
        self._expect(host == device, f"{stage}: {device} on the device, {host} on the host")
        lengths = [b - a for a, b in zip(device, device[1:], strict=False)]
        self.uneven[stage] += max(lengths) - min(lengths) > 1

    def _expect(self, holds: bool, message: str) -> None:
        if not holds:
            self.broken.append(f"step {len(self.budgets)}: {message}")

    def _checked_propose(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = self._propose(batch, *args, **kwargs)
        runner, speculator = self._runner, self._runner.speculator
        planned = speculator.planner.last.drafted
        lens = speculator.draft_lens[: batch.num_reqs].tolist()
        ends = runner.req_states.max_seq_len[batch.idx_mapping_np].tolist()
        totals = runner.req_states.total_len.gpu[batch.idx_mapping].tolist()
        self.budgets.append(planned)
        self._expect(sum(lens) == planned, f"split {lens} is not the plan's {planned}")
        for name, d, end, total, row in zip(
            batch.req_ids, lens, ends, totals, tokens.tolist(), strict=True
        ):
            self.lengths[d] += 1
            self._drafts[name] = row[:d]
            room = min(end, runner.max_model_len) - total
            # The verified draft is followed by one more token.
            self._expect(d == 0 or d + 1 <= room, f"{name}: draft of {d} with room for {room}")
            self._expect(
                all(t >= 0 for t in row[:d]) and all(t == -1 for t in row[d:]),
                f"{name}: draft of {d} wrote {row}",
            )
            if name.split("-")[0] in self.opted_out:
                self.refused += 1
                self._expect(d == 0, f"{name} opted out and got a draft of {d}")
        return tokens

    def _checked_prepare(self, *args: Any, **kwargs: Any) -> Any:
        batch = self._prepare(*args, **kwargs)
        if batch.num_draft_tokens_per_req is None:
            return batch
        last = self._runner.speculator.planner.last
        budget = last.verify.chosen.plan.verify_budget if last.verify is not None else 0
        self.verified.append(budget)
        if self._runner.speculator.host_split:
            host, device = batch.query_start_loc_np.tolist(), batch.query_start_loc.tolist()
            self._same_lengths("verify", host, device)
            host, device = batch.cu_num_logits_np.tolist(), batch.cu_num_logits.tolist()
            self._expect(host == device, f"logits: {device} on the device, {host} on the host")
        logits = batch.cu_num_logits.tolist()
        stops = batch.query_start_loc.tolist()[1:]
        rows = batch.input_ids.tolist()
        anchors = self._runner.req_states.last_sampled_tokens.flatten()[batch.idx_mapping].tolist()
        total = present = 0
        scheduled = batch.num_draft_tokens_per_req.tolist()
        for index, name in enumerate(batch.req_ids):
            count = logits[index + 1] - logits[index] - 1
            draft = self._drafts.get(name, [])[: scheduled[index]]
            total, present = total + count, present + len(draft)
            seen = rows[stops[index] - count : stops[index]]
            self._expect(seen == draft[:count], f"{name}: verified {seen} of the draft {draft}")
            if count:
                before = rows[stops[index] - count - 1]
                self._expect(before == anchors[index], f"{name}: {before} precedes its draft")
        self._expect(total == budget, f"verified {total} tokens with B = {budget}")
        self._expect(batch.num_draft_tokens == budget, f"B = {batch.num_draft_tokens}, {budget}")
        self._expect(budget <= present, f"B = {budget} of {present} present")
        return batch
