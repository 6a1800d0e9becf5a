from circle.half import whole
