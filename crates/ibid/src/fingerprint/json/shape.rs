//! Shapes: the names of objects that were read before, and the space around them.
//!
//! The objects of an array mostly have the same names in the same order, and so do the requests of one client. An object
//! of a known shape is read by comparing each name as a whole, and the order of its members is known.
//!
//! Example: `{"sku": "a", "price": 1}` has the shape `{"sku": _, "price": _}`, whose sorted order is `price`, `sku`.

use std::ops::Range;

use super::{
    output::TextRange,
    sort::MAX_FEW,
    token::{ChunkedText, digits, equal_bytes, literal, plain_end},
    walk::JsonChildren,
};

/// The number of shapes that are remembered.
const SHAPES: usize = 16;
/// The maximum of [`ObjectShapes::credit`].
const MAX_CREDIT: u32 = 8;

/// A short text.
#[derive(Clone, Copy)]
pub(super) struct ShapeText {
    pub(super) bytes: [u8; 32],
    pub(super) size: u32,
    /// The bytes that do not belong to it, one bit for each.
    others: u32,
}

impl ShapeText {
    const EMPTY: Self = Self { bytes: [0; 32], size: 0, others: u32::MAX };

    /// Returns `None` if it is too long.
    fn new(text: &[u8]) -> Option<Self> {
        let (mut bytes, size) = ([0; 32], text.len() as u32);
        bytes.get_mut(..text.len())?.copy_from_slice(text);
        Some(Self { bytes, size, others: u32::MAX.unbounded_shl(size) })
    }

    /// Whether a text has this one at a position.
    #[inline(always)]
    fn is_at(&self, source: ChunkedText<'_>, pos: u32) -> bool {
        let (halves, _) = self.bytes.as_chunks();
        (equal_bytes(source.chunk(pos), &halves[0]) | self.others) as u16 == u16::MAX
            && (self.size <= 16
                || (equal_bytes(source.chunk(pos + 16), &halves[1]) | self.others >> 16) as u16 == u16::MAX)
    }
}

/// The names of an object of scalars, in the order of the source.
#[derive(Clone, Copy)]
pub(super) struct ObjectShape {
    /// What precedes each value: a brace or comma, the name, the colon and space.
    before_values: [ShapeText; MAX_FEW],
    /// The brace and the space before it.
    after_values: ShapeText,
    /// Each name and the colon, in canonical form.
    pub(super) names: [ShapeText; MAX_FEW],
    /// The index of each member, in canonical order.
    sorted: [u8; MAX_FEW],
    len: usize,
    /// Whether the members are in order.
    pub(super) is_sorted: bool,
    /// Whether there is no space.
    pub(super) is_compact: bool,
}

impl ObjectShape {
    const NONE: Self = Self {
        before_values: [ShapeText::EMPTY; MAX_FEW],
        after_values: ShapeText::EMPTY,
        names: [ShapeText::EMPTY; MAX_FEW],
        sorted: [0; MAX_FEW],
        len: 0,
        is_sorted: true,
        is_compact: true,
    };

    /// The index of each member, in canonical order.
    #[inline(always)]
    pub(super) fn order(&self) -> impl Iterator<Item = usize> {
        self.sorted[..self.len].iter().map(|i| usize::from(*i) % MAX_FEW)
    }

    /// The shape of an object of scalars in a valid text. Returns `None` if it is too large, or if names have escapes, are
    /// not ASCII or differ only in case.
    fn of(text: &[u8], object: Range<usize>) -> Option<Self> {
        let mut shape = Self::NONE;
        let mut names: [&[u8]; MAX_FEW] = [b""; MAX_FEW];
        let mut end = object.start;
        for member in JsonChildren::of(text, object.start)? {
            let before = &text[end..member.value.start];
            let name = &text[member.start..member.value.start];
            let name = &name[..=name.iter().rposition(|byte| *byte == b'"')?];
            if name.contains(&b'\\') || !name.is_ascii() {
                return None;
            }
            *shape.before_values.get_mut(shape.len)? = ShapeText::new(before)?;
            shape.names[shape.len] = ShapeText::new(&[name, b":"].concat())?;
            names[shape.len] = &name[1..name.len() - 1];
            shape.is_compact &= before.len() == name.len() + 2;
            shape.len += 1;
            end = member.value.end;
        }
        shape.after_values = ShapeText::new(&text[end..object.end])?;
        shape.is_compact &= end + 1 == object.end;
        let names = &names[..shape.len];
        let is_twin = |(i, name): (usize, &&[u8])| names[..i].iter().any(|other| name.eq_ignore_ascii_case(other));
        if names.iter().enumerate().any(is_twin) {
            return None;
        }
        let order = &mut shape.sorted[..shape.len];
        order.iter_mut().zip(0..).for_each(|(place, i)| *place = i);
        order.sort_unstable_by_key(|i| names[usize::from(*i)]);
        shape.is_sorted = names.is_sorted();
        Some(shape)
    }

    /// Reads the object at a position, if it has this shape, and returns its end. Stores where the values are.
    #[inline(always)]
    pub(super) fn read(&self, source: ChunkedText<'_>, pos: u32, values: &mut [TextRange; MAX_FEW]) -> Option<u32> {
        let mut end = pos;
        for (before, value) in self.before_values[..self.len].iter().zip(values) {
            if !before.is_at(source, end) {
                return None;
            }
            end += before.size;
            value.start = end;
            let text = source.chunk(end - 1);
            end += match text[1] {
                b'"' => match plain_end(text) {
                    end if text.get(end) == Some(&b'"') => end as u32,
                    _ => source.plain_string(end)?,
                },
                b'1'..=b'9' => match digits(text) {
                    size if let Some(b',' | b'}') = text.get(size as usize + 1) => size,
                    _ => source.number(end)?,
                },
                b'-' | b'0' => source.number(end)?,
                _ => literal(text)?,
            };
            value.end = end;
        }
        (self.len > 0 && self.after_values.is_at(source, end)).then(|| end + self.after_values.size)
    }
}

/// The shapes of the last objects of scalars.
pub(super) struct ObjectShapes {
    shapes: [ObjectShape; SHAPES],
    /// How many shapes may be learned. Documents and objects of a known shape raise it, so that documents without
    /// repetition stay cheap.
    credit: u32,
}

impl ObjectShapes {
    pub(super) const fn new() -> Self {
        Self { shapes: [ObjectShape::NONE; SHAPES], credit: MAX_CREDIT }
    }

    #[inline(always)]
    pub(super) fn raise_credit(&mut self) {
        self.credit = (self.credit + 1).min(MAX_CREDIT);
    }

    /// The shape that the object at the start of a chunk probably has, by the start of its first name.
    #[inline(always)]
    pub(super) fn probable(&self, chunk: &[u8; 16]) -> &ObjectShape {
        &self.shapes[slot(chunk)]
    }

    /// Expects the next object with this first name to be like this one, whose values are scalars.
    #[cold]
    #[inline(never)]
    pub(super) fn learn(&mut self, text: &[u8], object: Range<usize>) {
        let Some(credit) = self.credit.checked_sub(1) else { return };
        self.credit = credit;
        if let Some(chunk) = text[object.start..].first_chunk()
            && let Some(shape) = ObjectShape::of(text, object)
        {
            self.shapes[slot(chunk)] = shape;
        }
    }
}

#[inline(always)]
fn slot(chunk: &[u8; 16]) -> usize {
    let [_, first @ .., _, _, _, _, _, _, _, _, _, _, _] = *chunk;
    (u32::from_le_bytes(first).wrapping_mul(0x9e37_79b1) >> 28) as usize % SHAPES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(object: &str) -> Option<ObjectShape> {
        ObjectShape::of(object.as_bytes(), 0..object.len())
    }

    #[test]
    fn a_shape_has_the_names_of_its_object_and_their_order() {
        let found = shape(r#"{"sku":"a,}","price":-1.5e3,"gift":false}"#).expect("a shape");
        assert_eq!(found.order().collect::<Vec<_>>(), [2, 1, 0]);
        assert!(found.is_compact && !found.is_sorted);
        let spaced = shape("{\"a\": 1, \"b\" :null\n}").expect("a shape");
        assert!(!spaced.is_compact && spaced.is_sorted);
        assert!(!shape(r#"{"a":1 }"#).expect("a shape").is_compact);
    }

    #[test]
    fn only_small_objects_with_plain_names_have_a_shape() {
        for object in [
            r#"{"a\u0062":1}"#,
            r#"{"a":1,"A":2}"#,
            r#"{"é":1}"#,
            r#"{"a_name_of_thirty_bytes_is_long":1}"#,
            r#"{"a":                             1}"#,
            r#"{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1,"h":1,"i":1,"j":1,"k":1,"l":1,"m":1,"n":1,"o":1,"p":1,"q":1}"#,
        ] {
            assert!(shape(object).is_none(), "{object}");
        }
    }
}
