import java.io.*;
import java.nio.file.*;
import java.util.*;
import org.junit.runner.*;
import org.junit.runner.notification.*;

/** Runs a class of JUnit 4, compiled to a folder, and prints beside a word how each of its tests ended. */
public class CrrlWitness {
    private static final int PASSED = 0, SKIPPED = 1, FAILED = 2;

    // The word and the outcomes are variables of this method: no field, file, property or argument leads there.
    public static void main(String[] args) throws Exception {
        String word = new BufferedReader(new InputStreamReader(System.in)).readLine().split(" ")[0];
        OutputStream out = new FileOutputStream(FileDescriptor.out);
        load(Path.of(args[1]));
        Map<String, Integer> outcomes = new LinkedHashMap<>();
        JUnitCore core = new JUnitCore();
        core.addListener(new RunListener() {
            private void note(Description test, int outcome) {
                outcomes.merge(test.getClassName() + "." + test.getMethodName(), outcome, Math::max);
            }
            @Override public void testFinished(Description test) { note(test, PASSED); }
            @Override public void testIgnored(Description test) { note(test, SKIPPED); }
            @Override public void testFailure(Failure failure) { note(failure.getDescription(), FAILED); }
            @Override public void testAssumptionFailure(Failure failure) {
                note(failure.getDescription(), isMadeIn(args[0], failure.getException()) ? SKIPPED : FAILED);
            }
        });
        boolean passed = core.run(Class.forName(args[0])).wasSuccessful();
        StringJoiner entries = new StringJoiner(", ");
        outcomes.forEach((name, outcome) -> entries.add(quote(name) + ": " + outcome));
        String line = "\n{\"word\": " + quote(word) + ", \"ok\": " + passed + ", \"outcomes\": {" + entries + "}}\n";
        out.write(line.getBytes("UTF-8"));
        Runtime.getRuntime().halt(passed ? 0 : 1);
    }

    // Loads all classes now: later, code under test could put others in their place.
    private static void load(Path folder) throws IOException {
        try (var paths = Files.walk(folder)) {
            for (Path path : (Iterable<Path>) paths::iterator) {
                String name = folder.relativize(path).toString();
                if (name.endsWith(".class")) {
                    try {
                        Class.forName(name.replaceFirst("\\.class$", "").replace('/', '.'), false, ClassLoader.getSystemClassLoader());
                    } catch (ClassNotFoundException | LinkageError error) {
                        System.err.println(error);
                    }
                }
            }
        }
    }

    // Whether the class of tests itself makes the assumption that skips a test: code under test may not.
    private static boolean isMadeIn(String tests, Throwable assumption) {
        for (StackTraceElement frame : assumption.getStackTrace()) {
            String name = frame.getClassName();
            if (!name.startsWith("org.junit.")) {
                return name.equals(tests) || name.startsWith(tests + "$");
            }
        }
        return false;
    }

    private static String quote(String text) {
        StringBuilder json = new StringBuilder("\"");
        for (char each : text.toCharArray()) {
            boolean plain = each >= 32 && each < 127 && each != '"' && each != '\\';
            json.append(plain ? String.valueOf(each) : String.format("\\u%04x", (int) each));
        }
        return json.append('"').toString();
    }
}
