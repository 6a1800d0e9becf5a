from circle.broken import nothing
import tinyrl
