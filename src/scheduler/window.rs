//! How many bytes may be on the link (DynamicInfer E.3.3): what is queued and what is added must arrive while the coming k layers are
//! computed. Looking further ahead allows a longer queue, but not more bytes per layer, because the link is a single queue.

/// The limit on the link's queue, from rates that are measured all the time. The paper measures once and leaves contention to future work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// Bytes that the link carries while one layer is computed.
    per_layer: f64,
    /// Layers during which the link may carry what is queued: those from a prediction to its use, or a multiple of them.
    layers: f64,
    /// Tokens for which only [`CAREFUL_SHARE`] of the window is used.
    careful: usize,
    /// Bytes that were sent and that the link, at its rate, cannot have carried yet.
    queued: f64,
}

/// Weight of a new measurement: the rate is about the mean of the last twenty layers.
const FOLLOW: f64 = 0.05;
/// Share of the window that is used in the first tokens of a sequence, when rates are not known well (E.3.3).
const CAREFUL_SHARE: f64 = 0.5;
/// How many tokens of a sequence use only a share of the window.
const CAREFUL_TOKENS: usize = 4;

impl Window {
    /// `bytes_per_layer`: what the link carries while a layer is computed, until it is measured. `ahead`: layers from a prediction to its
    /// use; `times`: length of the queue in these.
    pub fn new(bytes_per_layer: f64, ahead: usize, times: f32) -> Window {
        Window {
            per_layer: bytes_per_layer,
            // With less than a layer the link would wait between decisions.
            layers: (ahead as f64 * f64::from(times)).max(1.0),
            careful: CAREFUL_TOKENS,
            queued: 0.0,
        }
    }

    /// A sequence begins: its prompt and first tokens are no time to fill the link.
    pub fn begin_sequence(&mut self) {
        self.careful = CAREFUL_TOKENS;
    }

    /// A token has ended.
    pub fn token(&mut self) {
        self.careful = self.careful.saturating_sub(1);
    }

    /// A layer took `layer_ns` ns, and the link carries `gb_s` GB/s.
    pub fn measured(&mut self, layer_ns: f64, gb_s: f64) {
        let now = layer_ns * gb_s;
        if now.is_finite() && now >= 0.0 {
            self.queued = (self.queued - now).max(0.0);
            self.per_layer += FOLLOW * (now - self.per_layer);
        }
    }

    /// Bytes that the link carries while a layer is computed, as measured so far.
    pub fn bytes_per_layer(&self) -> f64 {
        self.per_layer
    }

    /// So many bytes are put on the link.
    pub fn sent(&mut self, bytes: u64) {
        self.queued += bytes as f64;
    }

    /// How many blocks of `bytes` may be added when `under_way` bytes have not been taken over ([`Window::room`]), where a block may be larger
    /// than what the link carries during a layer: one at least, once what is queued will have been carried when the next layer begins.
    pub fn blocks(&self, under_way: u64, bytes: u64) -> usize {
        let one = usize::from(self.queued < self.per_layer);
        one.max((self.room(under_way) / bytes.max(1)) as usize)
    }

    /// Bytes that may be added when `under_way` bytes have been sent and not taken over; 0 if the link is full. A neuron that comes late for its
    /// layer is taken over at the layer's next use, a token later: what the link must have carried by then is not on it any more.
    pub fn room(&self, under_way: u64) -> u64 {
        let under_way = (under_way as f64).min(self.queued);
        let share = if self.careful > 0 { CAREFUL_SHARE } else { 1.0 };
        (self.per_layer * self.layers * share - under_way).max(0.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_leaves_no_room_and_looking_ahead_lengthens_the_queue_only() {
        let steady = |ahead: usize| {
            let mut w = Window::new(1000.0, ahead, 1.0);
            (0..CAREFUL_TOKENS).for_each(|_| w.token());
            // Each layer the link takes a thousand bytes away, and the window fills up.
            let (mut under_way, mut sent) = (0u64, 0u64);
            for _ in 0..100 {
                let more = w.room(under_way);
                w.sent(more);
                (under_way, sent) = (under_way + more, sent + more);
                under_way = under_way.saturating_sub(1000);
                w.measured(100.0, 10.0);
            }
            (under_way, sent)
        };
        let ((queue1, sent1), (queue4, sent4)) = (steady(1), steady(4));
        assert_eq!((queue1, queue4), (0, 3000));
        // The queue's length is all that differs.
        assert_eq!(sent4 - sent1, 3000);
    }

    #[test]
    fn a_new_sequence_is_careful_and_rates_are_followed() {
        let mut w = Window::new(1000.0, 2, 1.0);
        assert_eq!(w.room(0), 1000);
        (0..CAREFUL_TOKENS).for_each(|_| w.token());
        w.sent(3000);
        assert_eq!((w.room(0), w.room(500), w.room(5000)), (2000, 1500, 0));
        // The link slows to a quarter: after a few layers the window has followed.
        (0..200).for_each(|_| w.measured(100.0, 2.5));
        assert!((w.bytes_per_layer() - 250.0).abs() < 1.0);
        w.measured(f64::NAN, 1.0);
        assert!(w.bytes_per_layer().is_finite());
    }

    /// What is decided while a layer is computed is sent with the next, and its layer chooses when its attention, a third of it, is over.
    #[test]
    fn half_of_the_queue_arrives_before_its_layer_and_all_of_it_does_not() {
        let late = |times| {
            let mut w = Window::new(1000.0, 2, times);
            (0..CAREFUL_TOKENS).for_each(|_| w.token());
            let (mut free, mut late) = (0.0, 0);
            for layer in 0..100 {
                let bytes = w.room(u64::MAX);
                w.sent(bytes);
                free = f64::max(free, f64::from(layer + 1)) + bytes as f64 / 1000.0;
                late += u32::from(free > f64::from(layer + 2) + 1.0 / 3.0);
                w.measured(100.0, 10.0);
            }
            late
        };
        assert_eq!((late(0.5), late(1.0)), (0, 100));
    }

    /// A group that missed its layer held the window for a token, though the link had nothing left to carry.
    #[test]
    fn what_the_link_has_carried_is_not_under_way() {
        let mut w = Window::new(1000.0, 2, 1.0);
        (0..CAREFUL_TOKENS).for_each(|_| w.token());
        w.sent(2000);
        assert_eq!(w.room(2000), 0);
        // Nothing was taken over, and two layers' time has passed.
        w.measured(100.0, 10.0);
        assert_eq!(w.room(2000), 1000);
        w.measured(100.0, 10.0);
        assert_eq!(w.room(2000), 2000);
    }

    #[test]
    fn of_blocks_larger_than_a_layers_share_one_follows_the_other() {
        let mut w = Window::new(1000.0, 1, 1.0);
        (0..CAREFUL_TOKENS).for_each(|_| w.token());
        // What has arrived and was not taken over yet counts as under way elsewhere; here the link decides.
        let mut sent = 0;
        for _ in 0..100 {
            let blocks = w.blocks(50_000, 2500);
            assert!(blocks <= 1);
            w.sent(2500 * blocks as u64);
            sent += blocks;
            w.measured(100.0, 10.0);
        }
        assert!((39..=41).contains(&sent), "100 layers carry 40 blocks, and {sent} were sent");
        assert_eq!(Window::new(0.0, 1, 1.0).blocks(0, 2500), 0, "a rate that is not known");
    }
}
