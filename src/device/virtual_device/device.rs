//! What a virtual device does for an engine.

use super::memory::{Bytes, Region};
use super::queue::{EventState, Work};
use super::rates::{HOST_CALL_NS, Rates};
use super::state::VirtualDevice;
use crate::device::{
    Block, Buffer, Call, Device, Event, Fault, HostWork, Memory, MoveMethod, OutOfMemory, Stage, Stream, Totals, run,
};

impl Device for VirtualDevice {
    fn name(&self) -> String {
        "virtual device".into()
    }

    fn memory(&self) -> Memory {
        self.memory
    }

    fn totals(&self) -> Totals {
        Totals { clock_ns: self.host_ns, ..self.totals }
    }

    fn is_real(&self) -> bool {
        false
    }

    fn fault(&self) -> Option<&Fault> {
        self.fault.as_ref()
    }

    fn prepare(&mut self, call: &Call) -> Result<(), OutOfMemory> {
        self.prepared = self.prepared.max(call.scratch_bytes());
        Ok(())
    }

    fn take(&mut self, bytes: u64, most: u64, reserved: bool) -> Result<Buffer, OutOfMemory> {
        self.host_ns += HOST_CALL_NS;
        let left = self.memory.budget.saturating_sub(self.memory.used);
        if bytes > left {
            return Err(OutOfMemory { asked: bytes, left });
        }
        self.memory.used += bytes;
        self.memory.peak = self.memory.peak.max(self.memory.used);
        let [here, most] = if reserved { [0, 0] } else { [bytes, most.next_multiple_of(4)] };
        let data = Region::new(here, most);
        self.buffers.push(Some(Bytes { data, reserved, writes: 0 }));
        Ok(Buffer { id: (self.buffers.len() - 1) as u32, bytes })
    }

    fn resize(&mut self, buffer: Buffer, bytes: u64) -> Result<Buffer, OutOfMemory> {
        let left = self.memory.budget.saturating_sub(self.memory.used);
        if bytes > buffer.bytes && bytes - buffer.bytes > left {
            return Err(OutOfMemory { asked: bytes - buffer.bytes, left });
        }
        Stream::ALL.into_iter().for_each(|s| self.synchronize(s));
        self.check(buffer, 0, buffer.bytes);
        let region = &mut self.buffers[buffer.id as usize].as_mut().expect("checked above").data;
        assert!(bytes <= region.most(), "buffer {} was not made for {bytes} bytes", buffer.id);
        region.resize(bytes);
        self.memory.used = self.memory.used - buffer.bytes + bytes;
        self.memory.peak = self.memory.peak.max(self.memory.used);
        Ok(Buffer { bytes, ..buffer })
    }

    fn set_budget(&mut self, bytes: u64) -> Result<(), OutOfMemory> {
        if self.memory.used > bytes {
            return Err(OutOfMemory { asked: self.memory.used, left: bytes });
        }
        self.memory = Memory { budget: bytes, peak: self.memory.used, ..self.memory };
        Ok(())
    }

    fn free(&mut self, buffer: Buffer) {
        Stream::ALL.into_iter().for_each(|s| self.synchronize(s));
        let there = self.buffers.get_mut(buffer.id as usize).and_then(Option::take);
        assert!(there.is_some(), "buffer {} was freed before, or never was", buffer.id);
        self.memory.used -= buffer.bytes;
    }

    fn event(&mut self) -> Event {
        self.events.push(EventState::default());
        Event((self.events.len() - 1) as u32)
    }

    unsafe fn copy_in(&mut self, stream: Stream, from: *const u8, bytes: usize, to: Buffer, at: u64) {
        self.check(to, at, bytes as u64);
        let before_us = self.rates.copy_us;
        self.put(stream, Work::CopyIn { from, to, at: at as usize, bytes, before_us });
    }

    fn can_move(&mut self, _by: MoveMethod) -> bool {
        true
    }

    /// A gather is one call whose blocks arrive one by one: each can be torn, late and overtaken as a copy can.
    unsafe fn move_blocks(&mut self, by: MoveMethod, blocks: &[Block], bytes: usize, to: Buffer) {
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            let n = if by == MoveMethod::Batched { run(rest, bytes) } else { 1 };
            let at = u64::from(first.slot) * bytes as u64;
            self.check(to, at, (n * bytes) as u64);
            let before_us = match by {
                MoveMethod::Gather if rest.len() == blocks.len() => self.rates.call_us,
                MoveMethod::Gather => 0.0,
                MoveMethod::Single | MoveMethod::Batched => self.rates.copy_us,
            };
            let copy = Work::CopyIn { from: first.from, to, at: at as usize, bytes: n * bytes, before_us };
            self.put(Stream::Copy, copy);
            rest = &rest[n..];
        }
    }

    unsafe fn copy_out(&mut self, stream: Stream, from: Buffer, at: u64, to: *mut u8, bytes: usize) {
        self.check(from, at, bytes as u64);
        self.put(stream, Work::CopyOut { from, at: at as usize, to, bytes });
    }

    fn launch(&mut self, stream: Stream, call: &Call) {
        call.operands(&mut |operand| self.check(operand.view.buffer, operand.view.at, operand.bytes));
        self.totals.unprepared += u64::from(call.scratch_bytes() > self.prepared);
        self.prepared = self.prepared.max(call.scratch_bytes());
        self.put_call(stream, call);
    }

    fn record(&mut self, stream: Stream, event: Event) {
        let state = &mut self.events[event.0 as usize];
        state.recorded += 1;
        let mark = state.recorded;
        self.put(stream, Work::Record { event, mark });
    }

    fn wait(&mut self, stream: Stream, event: Event) {
        let mark = self.events[event.0 as usize].recorded;
        self.put(stream, Work::Wait { event, mark });
    }

    fn worked(&mut self, work: HostWork) {
        let reading = Rates::ns(0.0, work.bytes, self.rates.host_gb_s);
        let host = reading.max(Rates::ns(0.0, work.operations, self.rates.host_gflops));
        let fixed = if work.stage == Stage::Ffn { Rates::ns(self.share_us, 0, 1.0) } else { 0 };
        self.totals.host_ns += host + fixed;
        self.host_ns += host + fixed;
    }

    fn is_done(&mut self, event: Event) -> bool {
        self.host_ns += HOST_CALL_NS;
        self.catch_up();
        let event = &self.events[event.0 as usize];
        event.done == event.recorded
    }

    fn elapsed_ns(&mut self, from: Event, to: Event) -> u64 {
        self.events[to.0 as usize].done_ns.saturating_sub(self.events[from.0 as usize].done_ns)
    }

    fn synchronize_event(&mut self, event: Event) {
        let began = self.host_ns;
        self.catch_up();
        while self.events[event.0 as usize].done < self.events[event.0 as usize].recorded
            && let Some(at) = self.step(u64::MAX)
        {
            self.host_ns = self.host_ns.max(at);
        }
        self.host_ns += Rates::ns(self.rates.sync_us, 0, 1.0);
        self.totals.waited_ns += self.host_ns - began;
    }

    fn synchronize(&mut self, stream: Stream) {
        let (s, began) = (stream as usize, self.host_ns);
        while !self.idle(s) {
            let done = self.step(u64::MAX);
            self.host_ns = self.host_ns.max(self.expect_step(done));
        }
        // Work may have ended behind the host's back.
        self.host_ns = self.host_ns.max(self.queues[s].free_ns) + Rates::ns(self.rates.sync_us, 0, 1.0);
        self.totals.waited_ns += self.host_ns - began;
    }
}
