//! Compares a device's kernels with the CPU's and times them: what `gpu-check` shows.

mod agreement;
mod operands;
mod speed;

pub use agreement::{Agreement, agreements};
pub use speed::{Launching, Speed, launching, speeds};

#[cfg(test)]
mod tests {
    use super::agreement::CHECKS;
    use super::*;
    use crate::device::{Call, Device, Rates, Tiles, VirtualDevice};

    fn device() -> VirtualDevice {
        let rates = Rates {
            device_gb_s: 100.0,
            // Arithmetic takes less time than reading.
            device_gflops: 1e6,
            link_gb_s: 1.0,
            host_gb_s: 1.0,
            host_gflops: 1.0,
            call_us: 0.0,
            copy_us: 0.0,
            sync_us: 0.0,
        };
        VirtualDevice::new(u64::MAX, rates)
    }

    #[test]
    fn a_device_agrees_with_itself_and_gives_its_memory_back() {
        let mut device = device();
        for (tiles, count) in [(Tiles::Lanes, 76), (Tiles::TensorCores, 9)] {
            let rows = agreements(&mut device, tiles).unwrap();
            assert!(rows.len() == count && rows.iter().all(|row| row.off == 0.0), "{rows:?}");
        }
        assert_eq!(device.memory().used, 0);
    }

    #[test]
    fn every_kernel_is_checked() {
        let checked: Vec<&str> = CHECKS.iter().map(|check| check.kernel).collect();
        assert_eq!(checked, Call::NAMES);
    }

    #[test]
    fn a_device_with_a_known_rate_is_timed_at_that_rate() {
        let mut device = device();
        let mut timed = Vec::new();
        for (tiles, count) in [(Tiles::Lanes, 24), (Tiles::TensorCores, 6)] {
            let speeds = speeds(&mut device, tiles, 1 << 16, 32).unwrap();
            assert_eq!(speeds.len(), count);
            timed.extend(speeds);
        }
        for s in timed {
            // Launching takes some time, too.
            assert!(s.gb_s <= 100.0 && s.gb_s > 85.0, "{s:?}");
        }
        assert_eq!(device.memory().used, 0);
    }
}
