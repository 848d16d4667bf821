//! Names of lines: beside the line's end, or in rows below the plot.

/// Places for names of height `height` that want to stand at `wanted`, so that none covers another and all lie between `top` and
/// `bottom`, as far as there is room; in the order given.
pub fn apart(wanted: &[f64], height: f64, top: f64, bottom: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|&a, &b| wanted[a].total_cmp(&wanted[b]));
    let mut places: Vec<f64> = order.iter().map(|&i| wanted[i].clamp(top, bottom.max(top))).collect();
    for i in 1..places.len() {
        places[i] = places[i].max(places[i - 1] + height);
    }
    // What was pushed out below is pushed back, with all that stands in its way.
    let mut below = bottom;
    for place in places.iter_mut().rev() {
        *place = place.min(below);
        below = *place - height;
    }
    let mut found = vec![0.0; wanted.len()];
    order.iter().zip(places).for_each(|(&i, place)| found[i] = place);
    found
}

/// Width of a text of this size, about: letters of a sans-serif are a little more than half as wide as high.
pub fn width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * 0.56
}

/// Names in rows of at most `room`: for each its row and its place in it. Each takes `before` and its own width.
pub fn rows(names: &[&str], size: f64, before: f64, room: f64) -> Vec<(usize, f64)> {
    let (mut row, mut at) = (0, 0.0);
    let place = |name: &&str| {
        let wide = before + width(name, size) + 14.0;
        if at > 0.0 && at + wide > room {
            (row, at) = (row + 1, 0.0);
        }
        let found = (row, at);
        at += wide;
        found
    };
    names.iter().map(place).collect()
}

/// A text in lines of at most `room`, cut between words.
pub fn wrapped(text: &str, size: f64, room: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if width(line, size) + width(word, size) + size * 0.56 <= room => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::{apart, rows, wrapped};

    #[test]
    fn names_never_cover_each_other_and_stay_inside() {
        for wanted in [vec![10.0, 10.0, 10.0], vec![95.0, 99.0, 100.0, 20.0], vec![0.0, 50.0], vec![-20.0, 300.0]] {
            let places = apart(&wanted, 15.0, 5.0, 100.0);
            let mut sorted = places.clone();
            sorted.sort_by(f64::total_cmp);
            assert!(sorted.windows(2).all(|w| w[1] - w[0] >= 15.0 - 1e-9), "{wanted:?}: {places:?}");
            assert!(sorted[0] >= 5.0 && *sorted.last().unwrap() <= 100.0, "{wanted:?}: {places:?}");
        }
        assert_eq!(apart(&[80.0, 20.0], 15.0, 0.0, 100.0), [80.0, 20.0], "what does not collide stays");
    }

    #[test]
    fn rows_and_lines_are_as_wide_as_there_is_room() {
        let places = rows(&["static", "full", "a longer name than those"], 13.0, 20.0, 200.0);
        assert_eq!(places.iter().map(|p| p.0).collect::<Vec<_>>(), [0, 0, 1]);
        assert_eq!(wrapped("a text of several words", 10.0, 60.0), ["a text of", "several", "words"]);
        assert!(wrapped("", 10.0, 60.0).is_empty());
    }
}
